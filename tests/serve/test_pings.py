"""What both servers do with WebSocket clients that do not read: states must not pile up for them."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.serve.portal import Portal, environment
from tests.support.waiting import wait_until

MASKED_TEXT = b"\x81\x82\x00\x00\x00\x00hi"
"""A frame of a client: `hi`, under a mask of zeros."""


@pytest.fixture(params=["daphne", "uvicorn"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def served(kind: str, directory: Path, **variables: str) -> Portal:
    command = [sys.executable, "-m", "tests.serve.toy", *([] if kind == "daphne" else [kind])]
    return Portal(directory, command, environment(directory, DJANGO_SETTINGS_MODULE="", **variables))


@pytest.fixture
def toy(kind: str, tmp_path: Path) -> Iterator[Portal]:
    with served(kind, tmp_path) as server:
        yield server.ready()


@contextlib.contextmanager
def deaf(toy: Portal) -> Iterator[socket.socket]:
    """A WebSocket client that never reads: its buffer fills, and no ping reaches it."""
    with toy.connect() as client:
        key = base64.b64encode(os.urandom(16)).decode()
        head = (
            "GET /flood HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        client.sendall(head.encode())
        wait_until(lambda: flooded(toy) == 1, 60, "the server does not send")
        yield client


def flooded(toy: Portal) -> int:
    return int(httpx.get(toy.url + "/flooded").text)


def test_a_client_that_does_not_read_is_dropped(toy):
    with deaf(toy):
        wait_until(lambda: flooded(toy) == 0, 60, "the server goes on sending")


def test_a_client_that_sends_all_the_time_but_does_not_read_is_dropped(toy):
    stop = threading.Event()

    def talk(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                client.sendall(MASKED_TEXT)

    with deaf(toy) as client:
        talking = threading.Thread(target=talk, args=(client,))
        talking.start()
        try:
            wait_until(lambda: flooded(toy) == 0, 60, "the server goes on sending")
        finally:
            stop.set()
            talking.join()


def test_a_client_that_reads_stays_and_hears_many_pings(kind, tmp_path):
    """The time for an answer is one in which this process surely runs, however busy the machine is."""
    with served(kind, tmp_path, TOY_PING_TIMEOUT="6") as toy:
        toy.ready()
        with connect(toy.url.replace("http", "ws") + "/flood", max_size=None) as client:
            for _ in range(800):  # eight seconds at the least: longer than a client may be silent
                assert len(client.recv(timeout=60)) == 100_000
            assert flooded(toy) == 1
