"""The portal's Daphne around a toy application: `python -m tests.serve.toy`, prints its address."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import daphne.server  # noqa: F401 - first: it installs the reactor

from kvportal.server import Times
from kvportal.server.daphne_server import run_daphne
from kvportal.server.listening import listen, listening_url
from kvportal.server.stopping import StopRequest

MAX_BODY_BYTES = 1_000_000


async def application(scope: Any, receive: Any, send: Any) -> None:
    """/boom fails, /stuck never answers, /connections and /messages count, /tasks/leave leaves a task."""
    path, messages = scope["path"], 0
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        if path == "/boom":
            raise RuntimeError("boom")
        await asyncio.Event().wait()
    size, more = 0, True
    while more:
        message = await receive()
        size, messages, more = size + len(message["body"]), messages + 1, message["more_body"]
    if path == "/boom":
        raise RuntimeError("boom")
    if path == "/stuck":
        await asyncio.Event().wait()
    if path == "/tasks/leave":
        _left.add(asyncio.create_task(asyncio.Event().wait()))
    server = send.func.__self__
    text = {"/connections": str(len(server.connections)), "/messages": f"{messages} {size}"}.get(path, "ok")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


_left: set[asyncio.Task[Any]] = set()


def main() -> None:
    with StopRequest(10) as stop:
        listener = listen("127.0.0.1", 0)
        sys.stdout.write(f"kvportal serves {listening_url(listener)} \n")
        sys.stdout.flush()
        run_daphne(
            application,
            listener,
            stop,
            Times(in_flight=0.2),
            max_body_bytes=MAX_BODY_BYTES,
            on_drain=lambda: sys.stdout.write("drain\n"),
            attach=lambda loop: sys.stdout.write("attach\n"),
            detach=lambda: sys.stdout.write("detach\n"),
        )


if __name__ == "__main__":
    main()
