"""The real `manage.py serve` (or another ASGI server) as a child process of a test."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.support.processes import ManagedProcess
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 30.0
"""Deadlines of the tests; the promise itself (5 s) is bounded by the portal's own watchdog."""


def environment(data_dir: Path, **changes: str) -> dict[str, str]:
    """The test's environment with a data directory and nothing else of ours."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("KVPORTAL_", "ETCD_"))
    }
    return {**inherited, "KVPORTAL_DATA_DIR": str(data_dir), "PYTHONUNBUFFERED": "1", **changes}


class Portal:
    """One process, and the address it said that it serves."""

    def __init__(self, directory: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / f"portal-{time.monotonic_ns()}.log"
        self.process = ManagedProcess(command, log, env=env, cwd=CHECKOUT)
        self.url = ""

    @classmethod
    def serve(cls, data_dir: Path, *flags: str, **variables: str) -> Portal:
        """`manage.py serve` on a port that the system chooses."""
        command = [sys.executable, "manage.py", "serve", "--http-server-port=0", *flags]
        return cls(data_dir, command, environment(data_dir, **variables))

    @classmethod
    def uvicorn(cls, data_dir: Path, **variables: str) -> Portal:
        """Plain uvicorn on the ASGI application, on a port that the system chooses."""
        command = [sys.executable, "-m", "uvicorn", "kvportal.asgi:application", "--port=0"]
        return cls(data_dir, command, environment(data_dir, **variables))

    def ready(self) -> Portal:
        """Waits until it serves; fails with its output when it ends instead."""

        def serving() -> bool:
            assert self.process.running, f"it ended with {self.process.returncode}:\n{self.process.output()}"
            if not self.url:
                found = re.search(r"(?:kvportal serves|Uvicorn running on) (\S+) ", self.process.output())
                self.url = found[1] if found else ""
            return bool(self.url) and self.answers("/livez")

        wait_until(serving, START_SECONDS, lambda: f"it does not serve:\n{self.process.output()}")
        return self

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def refuses_connections(self) -> bool:
        try:
            self.connect().close()
        except ConnectionRefusedError:
            return True
        return False

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(STOP_SECONDS)

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.running:
            self.process.kill()


def sign_in(url: str, username: str, password: str) -> dict[str, str]:
    """The cookies of a session of that user."""
    with httpx.Client(base_url=url, timeout=20) as client:
        client.get("/admin/login/")
        form = {
            "username": username,
            "password": password,
            "csrfmiddlewaretoken": client.cookies["csrftoken"],
        }
        answer = client.post("/admin/login/?next=/livez", data=form)
        assert answer.status_code == 302, answer.text
        return dict(client.cookies)
