"""The portal's servers around a toy application: `python -m tests.serve.toy [uvicorn]` tells its address."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import daphne.server  # noqa: F401 - first: it installs the reactor

from kvportal.server import Times
from kvportal.server.daphne_server import run_daphne
from kvportal.server.listening import listen, listening_url
from kvportal.server.stopping import StopRequest
from kvportal.server.uvicorn_server import run_uvicorn

MAX_BODY_BYTES = 1_000_000


async def application(scope: Any, receive: Any, send: Any) -> None:
    """/boom fails, /stuck never answers, /connections and /messages count, /tasks/leave leaves a task,
    /flood sends and sends, /flooded counts those it sends to, /fields those that were read out of a form,
    /arriving the bytes of unfinished bodies and those turned away, /refusal closes its connection, /root
    tells what stands around the path."""
    await {"lifespan": lifespan, "websocket": websocket, "http": answer}[scope["type"]](scope, receive, send)


async def lifespan(scope: Any, receive: Any, send: Any) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


async def websocket(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    if scope["path"] == "/flood":
        await flood(receive, send)
        return
    await receive()
    if scope["path"] == "/boom":
        raise RuntimeError("boom")
    await asyncio.Event().wait()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    path, messages, size, more = scope["path"], 0, 0, True
    while more:
        message = await receive()
        size, messages, more = size + len(message["body"]), messages + 1, message["more_body"]
    if path == "/boom":
        raise RuntimeError("boom")
    if path == "/stuck":
        await asyncio.Event().wait()
    if path == "/tasks/leave":
        _left.add(asyncio.create_task(asyncio.Event().wait()))
    text = {"/flooded": str(len(_flooded)), "/messages": f"{messages} {size}"}.get(path, "ok")
    if path == "/connections":
        text = str(len(send.func.__self__.connections))
    if path == "/fields":
        text = str(len(send.args[0].args))
    if path == "/arriving":
        server = send.func.__self__
        turned_away = sum(getattr(each, "turned_away", False) for each in server.connections)
        text = f"{server.arriving} {turned_away}"
    headers = [(b"connection", b"close")] if path == "/refusal" else []
    if path == "/root":
        text = f"{scope['root_path']!r} {scope['query_string']!r}"
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


_left: set[asyncio.Task[Any]] = set()
_flooded: set[asyncio.Task[Any]] = set()


async def flood(receive: Any, send: Any) -> None:
    """Sends 100 kB every 10 ms until the client is gone."""

    async def sending() -> None:
        while True:
            await send({"type": "websocket.send", "text": "x" * 100_000})
            await asyncio.sleep(0.01)

    task = asyncio.create_task(sending())
    _flooded.add(task)
    while (await receive())["type"] != "websocket.disconnect":
        pass
    _flooded.discard(task)
    task.cancel()


def main() -> None:
    with StopRequest(10) as stop:
        listener = listen("127.0.0.1", 0)
        sys.stdout.write(f"kvportal serves {listening_url(listener)} \n")
        sys.stdout.flush()
        arrival = float(os.environ.get("TOY_ARRIVAL", "120"))
        ping_timeout = float(os.environ.get("TOY_PING_TIMEOUT", "2"))
        times = Times(in_flight=0.2, ping_interval=1, ping_timeout=ping_timeout, arrival=arrival)
        if sys.argv[1:] == ["uvicorn"]:
            run_uvicorn(application, listener, stop, times, on_drain=lambda: None)
            return
        run_daphne(
            application,
            listener,
            stop,
            times,
            max_body_bytes=MAX_BODY_BYTES,
            on_drain=lambda: sys.stdout.write("drain\n"),
            attach=lambda loop: sys.stdout.write("attach\n"),
            detach=lambda: sys.stdout.write("detach\n"),
        )


if __name__ == "__main__":
    main()
