"""A real HTTP server in this process, so that it serves what a test has installed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from django.core.asgi import get_asgi_application

from kvportal.fastpath import FastPath
from tests.support.waiting import wait_until


@contextmanager
def served(max_body_bytes: int) -> Iterator[str]:
    """The portal's HTTP application on a port of the system's choice; its base URL."""
    django: Any = get_asgi_application()
    config = uvicorn.Config(
        FastPath(django, max_body_bytes=max_body_bytes),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: server.started, 20)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
