"""A real portal as a child process, with a database that has one user for each kind of person."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

from streams.spec import StreamSpec
from tests.support.processes import ManagedProcess
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
PASSWORD = "kv-portal-tests"
START_TIMEOUT = 60.0

ADMIN, OPERATOR, VIEWER, BARE, OUTSIDER = "admin", "operator", "viewer", "bare", "outsider"
"""Superuser; staff who may view and resync; staff who may view; staff without permissions; no staff."""

_MAKE_USERS = f"""
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import Permission, User
password = make_password({PASSWORD!r})
people = {{name: User.objects.create(username=name, password=password, is_staff=name != {OUTSIDER!r})
          for name in ({ADMIN!r}, {OPERATOR!r}, {VIEWER!r}, {BARE!r}, {OUTSIDER!r})}}
User.objects.filter(username={ADMIN!r}).update(is_superuser=True)
views = Permission.objects.filter(
    content_type__app_label__in=("streams", "kvportal", "routing"), codename__startswith="view_")
people[{VIEWER!r}].user_permissions.set(views)
people[{OPERATOR!r}].user_permissions.set([*views, Permission.objects.get(codename="resync_stream")])
"""

LEFT = "10.9.9.9:8000"
"""An instance of which nobody follows the stream any more."""
_LEAVE_A_STREAM = f"""
from datetime import UTC, datetime
from streams.models import Stream
at = datetime.now(UTC)
Stream.objects.create(instance_name={LEFT!r}, dp_rank=0, endpoint="tcp://10.9.9.9:28000",
                      replay_endpoint="tcp://10.9.9.9:48000", first_seen=at, last_seen=at)
"""


def environment(data_dir: Path, **variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "KVPORTAL_DATA_DIR": str(data_dir),
        "DJANGO_SETTINGS_MODULE": "kvportal.settings",
        **variables,
    }


def manage(data_dir: Path, *arguments: str, **variables: str) -> None:
    """Run a management command in its own process; its output is shown when it fails."""
    result = subprocess.run(
        [sys.executable, CHECKOUT / "manage.py", *arguments],
        env=environment(data_dir, **variables),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}"


def prepare_data(data_dir: Path, **variables: str) -> None:
    """A migrated database with the users and a stream that was left; worth doing once and copying."""
    data_dir.mkdir(mode=0o700, exist_ok=True)
    manage(data_dir, "migrate", "--noinput", "-v", "0", **variables)
    manage(data_dir, "shell", "-v", "0", "-c", _MAKE_USERS + _LEAVE_A_STREAM, **variables)


def stream_entry(spec: StreamSpec) -> dict[str, object]:
    names = ("instance_name", "dp_rank", "block_size", "endpoint", "replay_endpoint", "topic")
    return {name: getattr(spec, name) for name in names}


def register(portal: Portal, name: str, **changes: Any) -> None:
    """Register an instance by the internal API."""
    registration = {"name": name, "incarnation_id": "life-1", "type": 0, "dp_size": 1, "ttl_s": 600}
    portal.call("PUT", f"instances/{name}", {**registration, **changes})


def beat(portal: Portal, name: str, waiting: int = 3) -> None:
    """Report a load."""
    load = {"waiting_requests_num": waiting, "gpu_cache_usage_perc": 0.25}
    portal.call(
        "POST", "instances/heartbeat", {"name": name, "incarnation_id": "life-1", "load_metrics": load}
    )


class Portal:
    """`manage.py serve` on a port of its own. `base` is its address, without a slash at the end."""

    def __init__(
        self,
        directory: Path,
        template: Path,
        streams: Iterable[StreamSpec] | None = (),
        *,
        flags: Iterable[str] = (),
        variables: dict[str, str] | None = None,
        **events: object,
    ) -> None:
        """`streams` None: no KV events file, the index is off. `events`: other keys of that file."""
        self.data_dir = directory / "data"
        shutil.copytree(template, self.data_dir)
        self._flags = [*flags]
        self._environment = environment(self.data_dir, **(variables or {}))
        self._log = directory / "serve.log"
        self._process: ManagedProcess | None = None
        self._port = "0"
        self.base = ""
        if streams is not None:
            path = directory / "kv-events.json"
            path.write_text(json.dumps({"streams": [stream_entry(spec) for spec in streams], **events}))
            self._flags += ["--kv-events-config-file", str(path)]

    def start(self) -> Self:
        """Start, or start again on the same port, and wait until it serves."""
        self._log.unlink(missing_ok=True)
        command = [sys.executable, CHECKOUT / "manage.py", "serve", "--http-server-port", self._port]
        process = self._process = ManagedProcess(
            [str(part) for part in command] + self._flags, self._log, env=self._environment, cwd=CHECKOUT
        )
        found = wait_until(
            lambda: re.search(r"serves (http://\S+?)/? \(", process.output()) or not process.running,
            START_TIMEOUT,
            lambda: f"the portal does not start:\n{process.tail()}",
        )
        assert isinstance(found, re.Match), f"the portal ended:\n{process.tail()}"
        self.base = found.group(1)
        self._port = self.base.rsplit(":", 1)[1]
        return self

    @property
    def process(self) -> ManagedProcess:
        assert self._process is not None
        return self._process

    def call(self, method: str, path: str, body: Any) -> Any:
        """Ask the internal API; the answer's JSON, None for an empty one."""
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = Request(f"{self.base}/v1/internal/{path}", data, headers, method=method)
        with urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def output(self) -> str:
        return self.process.output()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
