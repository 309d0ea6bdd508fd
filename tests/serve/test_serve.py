"""`manage.py serve` as a real process with real signals, on both servers."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from django.db import OperationalError
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from kvportal.database import why_unusable
from tests.instances.support import closed_port
from tests.serve.conftest import STAFF
from tests.serve.portal import Portal, environment, sign_in
from tests.support.waiting import wait_until

SERVERS = ("daphne", "uvicorn")
both_servers = pytest.mark.parametrize("server", SERVERS)
BODY = b'{"token_ids": []}'


def staff_socket(portal: Portal, *, origin: str | None = None) -> ClientConnection:
    """An open `/ws/ops/` of a signed-in user."""
    cookies = sign_in(portal.url, *STAFF.values())
    cookie = "; ".join(f"{key}={value}" for key, value in cookies.items())
    return connect(
        portal.url.replace("http", "ws") + "/ws/ops/",
        origin=Origin(origin or portal.url),
        additional_headers={"Cookie": cookie},
    )


class HalfSent:
    """A POST of which the last byte is still missing: in flight for as long as one likes."""

    def __init__(self, portal: Portal) -> None:
        self.socket = portal.connect()
        head = f"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n"
        self.socket.sendall(head.encode() + BODY[:-1])

    def finish(self) -> bytes:
        """Sends the rest; everything that comes back until the server closes."""
        with self.socket:
            self.socket.sendall(BODY[-1:])
            answer = b""
            while chunk := self.socket.recv(65536):
                answer += chunk
            return answer


def is_received(portal: Portal) -> None:
    """A request that was sent on another connection before has reached the server by now: two more
    have been answered since."""
    assert portal.answers("/livez")
    assert portal.answers("/livez")


@pytest.fixture
def hangup_counts():
    """Processes of this test heed SIGHUP, also when the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("server", "number"),
    [
        ("daphne", signal.SIGTERM),
        ("daphne", signal.SIGINT),
        ("daphne", signal.SIGHUP),
        ("uvicorn", signal.SIGTERM),
        ("uvicorn", signal.SIGHUP),
    ],
)
def test_a_signal_ends_it_with_status_0_and_frees_the_port(data_dir, hangup_counts, server, number):
    with Portal.serve(data_dir, f"--server={server}") as portal:
        portal.ready().signal(number)
        assert portal.ended() == 0
        assert portal.refuses_connections()
        assert "Traceback" not in portal.process.output()
        assert "cut short" not in portal.process.output()


def test_the_end_does_not_wait_for_the_interpreter_to_tidy_up(data_dir, tmp_path):
    """That takes half a second of a core, unwatched, after all is done."""
    tidying = "import atexit; atexit.register(lambda: print('tidying up', flush=True))\n"
    (tmp_path / "sitecustomize.py").write_text(tidying)
    with Portal.serve(data_dir, PYTHONPATH=str(tmp_path)) as portal:
        portal.ready().signal(signal.SIGTERM)
        assert portal.ended() == 0
        assert "tidying up" not in portal.process.output()


@both_servers
def test_a_request_in_flight_is_answered_before_the_end(data_dir, server):
    with Portal.serve(data_dir, f"--server={server}") as portal:
        portal.ready()
        request = HalfSent(portal)
        is_received(portal)
        portal.signal(signal.SIGTERM)
        wait_until(portal.refuses_connections, 10, "the port stays open")
        answer = request.finish()
        assert answer.startswith(b"HTTP/1.1 403")
        assert b"connection: close" in answer.lower()
        assert portal.ended() == 0


@both_servers
def test_a_request_that_never_ends_does_not_keep_it(data_dir, server):
    with Portal.serve(data_dir, f"--server={server}") as portal:
        portal.ready()
        request = HalfSent(portal)
        is_received(portal)
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0
        request.socket.close()
        if server == "daphne":  # uvicorn logs what it cancels with a traceback
            assert "Traceback" not in portal.process.output()


@both_servers
def test_an_open_websocket_is_closed_with_a_close_frame(data_dir, server):
    with Portal.serve(data_dir, f"--server={server}") as portal, staff_socket(portal.ready()) as websocket:
        assert json.loads(websocket.recv(timeout=10))["type"] == "state"
        portal.signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionClosedError):  # what any code but 1000 and 1001 counts as
            for _ in websocket:
                pass
        assert websocket.close_code == {"daphne": 1001, "uvicorn": 1012}[server]
        assert portal.ended() == 0
        assert "Traceback" not in portal.process.output()


@pytest.mark.parametrize("attempt", range(2))
def test_the_end_is_clean_with_everything_open_at_once(data_dir, attempt):
    """Python 3.11 with a Daphne that is stopped carelessly crashes here, about every other time."""
    with Portal.serve(data_dir) as portal, contextlib.ExitStack() as stack:
        portal.ready()
        idle = stack.enter_context(httpx.Client(base_url=portal.url))
        assert idle.get("/livez").status_code == 200
        websockets = [stack.enter_context(staff_socket(portal)) for _ in range(3)]
        requests = [HalfSent(portal) for _ in range(3)]
        is_received(portal)
        portal.signal(signal.SIGTERM)
        wait_until(portal.refuses_connections, 10, "the port stays open")
        for request in requests:
            assert request.finish().startswith(b"HTTP/1.1 403")
        assert portal.ended() == 0
        assert "Traceback" not in portal.process.output()
        assert "cut short" not in portal.process.output()
        assert len(websockets) == 3


@both_servers
def test_draining_is_told_by_readyz_alone_and_a_second_ctrl_c_ends_it_at_once(data_dir, server):
    with Portal.serve(data_dir, f"--server={server}", KVPORTAL_DRAIN_SECONDS="600") as portal:
        portal.ready().signal(signal.SIGINT)

        def draining() -> bool:
            answer = httpx.get(portal.url + "/readyz")
            return answer.status_code == 503 and "draining" in answer.text

        wait_until(draining, 10, "readyz does not say that it drains")
        portal.signal(signal.SIGTERM)  # repeated by a process manager: changes nothing
        assert portal.answers("/livez")
        assert portal.answers("/livez")
        portal.signal(signal.SIGINT)
        assert portal.ended() == 130


def test_it_stops_by_itself_after_the_drain_time(data_dir):
    with Portal.serve(data_dir, KVPORTAL_DRAIN_SECONDS="0.3") as portal:
        portal.ready().signal(signal.SIGTERM)
        assert portal.ended() == 0


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Nobody else can write to this database."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


def test_a_thread_that_waits_for_the_database_does_not_keep_it(data_dir):
    """Signing in writes; the thread waits for the lock for longer than a stop may take."""
    with Portal.serve(data_dir) as portal:
        portal.ready()
        with locked(data_dir / "kvportal.sqlite3"):

            def attempt() -> None:
                with contextlib.suppress(httpx.HTTPError, AssertionError):
                    sign_in(portal.url, *STAFF.values())

            person = threading.Thread(target=attempt)
            person.start()
            wait_until(lambda: waits_in_sqlite(portal.process.pid), 15, "nobody waits for the lock")
            portal.signal(signal.SIGTERM)
            assert portal.ended() == 0
            person.join(30)
        assert "still running:" in portal.process.output()


def waits_in_sqlite(pid: int) -> bool:
    """Whether a thread of that process sleeps between two attempts to get SQLite's lock: the only
    place where one of the portal's threads that serves requests sleeps on the clock."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text()
            call = (task / "syscall").read_text().split()[0]
            if call in {"230", "35", "115"} and name:  # clock_nanosleep, nanosleep (x86-64, arm64)
                return True
    return False


def test_a_busy_port_is_said_in_a_sentence(data_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Portal.serve(data_dir, f"--http-server-port={port}") as portal:
            assert portal.ended() == 1
            assert portal.process.output() == (
                f"cannot listen on http://127.0.0.1:{port}: another process already listens there; "
                "stop it, or choose another --http-server-port\n"
            )


def test_an_unmigrated_database_is_refused_with_the_command_that_helps(tmp_path):
    with Portal.serve(tmp_path / "var") as portal:
        assert portal.ended() == 1
        assert "run manage.py migrate --noinput" in portal.process.output()
        assert len(portal.process.output().splitlines()) == 1
    assert not (tmp_path / "var" / "kvportal.sqlite3").exists()


@pytest.mark.parametrize("content", [b"not a database, but long enough to be taken for one " * 100, None])
def test_a_file_that_is_no_database_is_refused_in_a_sentence_and_left_alone(data_dir, content):
    path = data_dir / "kvportal.sqlite3"
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with Portal.serve(data_dir) as portal:
        assert portal.ended() == 1
        [line] = portal.process.output().splitlines()
    assert line.startswith(f"the database {path} cannot be used (")
    assert "run manage.py migrate --noinput" in line
    assert content is None or path.read_bytes() == content


def test_a_database_that_somebody_else_has_locked_does_not_keep_it_from_starting(tmp_path, monkeypatch):
    """Told by SQLite's own code, which a lock that lasts 20 s would take long to produce."""
    error = OperationalError("database is locked")
    error.__cause__ = sqlite3.OperationalError("database is locked")
    for code, refused in ((sqlite3.SQLITE_BUSY_SNAPSHOT, False), (sqlite3.SQLITE_LOCKED, False), (26, True)):
        error.__cause__.sqlite_errorcode = code
        assert (why_unusable(error) is not None) is refused


def test_a_websocket_client_that_only_reads_gets_what_changes(data_dir):
    with Portal.serve(data_dir) as portal, staff_socket(portal.ready()) as websocket:
        assert "series" in json.loads(websocket.recv(timeout=10))
        versions = [json.loads(websocket.recv(timeout=20))["version"] for _ in range(2)]
        assert len(versions) == 2


def test_nohup_keeps_it_alive_when_its_terminal_goes(data_dir):
    command = [sys.executable, "manage.py", "serve", "--http-server-port=0"]
    with Portal(data_dir, ["nohup", *command], environment(data_dir)) as portal:
        portal.ready().signal(signal.SIGHUP)
        assert portal.answers("/livez")
        assert portal.answers("/livez")
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0


def test_a_list_of_etcd_members_without_any_is_a_fault(data_dir):
    for text in ("", "a:1,,b:2"):
        with Portal.serve(data_dir, "--instance-source=etcd", "--etcd-addr", text) as portal:
            assert portal.ended() == 2
            [line] = portal.process.output().splitlines()
            assert line.startswith(f"--etcd-addr: found {text!r}; allowed: host:port")


def test_faults_end_it_with_status_2_and_a_line_for_each(data_dir):
    with Portal.serve(data_dir, "--server=x", "--unknown", KVPORTAL_TARGET_TTFT="0") as portal:
        assert portal.ended() == 2
        lines = portal.process.output().splitlines()
        assert [line.split(": found")[0] for line in lines] == [
            "--unknown",
            "--server",
            "KVPORTAL_TARGET_TTFT",
        ]


@both_servers
def test_a_database_that_does_not_answer_does_not_keep_it_from_starting(data_dir, server):
    with (
        closed_port() as port,
        Portal.serve(
            data_dir,
            f"--server={server}",
            KVPORTAL_DATABASE_URL=f"postgres://portal@127.0.0.1:{port}/portal",
        ) as portal,
    ):
        portal.ready()
        assert "the database does not answer" in portal.process.output()
        with pytest.raises(InvalidStatus) as refused:
            connect(
                portal.url.replace("http", "ws") + "/ws/ops/",
                origin=Origin(portal.url),
                additional_headers={"Cookie": "sessionid=somebody-or-other"},
            )
        assert refused.value.response.status_code == 403
        wait_until(lambda: "a page is not let in" in portal.process.output())
        for complaint in ("the application failed", "Exception in ASGI application"):
            assert complaint not in portal.process.output()
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0


def test_a_signal_while_it_starts_ends_it(data_dir):
    """The start hangs in a database that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgres://portal@127.0.0.1:{silent.getsockname()[1]}/portal"
        with Portal.serve(data_dir, KVPORTAL_DATABASE_URL=url) as portal:
            client, _ = silent.accept()
            with client:
                portal.signal(signal.SIGTERM)
                assert portal.ended() == 0


@both_servers
def test_a_signal_while_it_loads_its_parts_ends_it(data_dir, tmp_path, server):
    """Sent from within, when the first of them is looked for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'kvportal.asgi':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    with Portal.serve(data_dir, f"--server={server}", PYTHONPATH=str(tmp_path)) as portal:
        assert portal.ended() == 0
        assert "kvportal serves" not in portal.process.output()
        assert "Traceback" not in portal.process.output()


class TestWebSocket:
    @pytest.fixture(scope="class")
    @classmethod
    def portal(cls, prepared: Path) -> Iterator[Portal]:
        with Portal.serve(prepared) as portal:
            yield portal.ready()

    @pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:1", "http://127.0.0.1"])
    def test_a_page_of_another_origin_is_refused(self, portal, origin):
        with pytest.raises(InvalidStatus) as refused:
            staff_socket(portal, origin=origin)
        assert refused.value.response.status_code == 403

    @pytest.mark.parametrize("path", ["/ws/ops/", "/ws/other/"])
    def test_nobody_in_particular_is_refused(self, portal, path):
        with pytest.raises(InvalidStatus) as refused:
            connect(portal.url.replace("http", "ws") + path, origin=Origin(portal.url))
        assert refused.value.response.status_code == 403


class TestDaphneBodies:
    """What the portal's Daphne does with bodies, seen from outside."""

    @pytest.fixture(scope="class")
    @classmethod
    def portal(cls, prepared: Path) -> Iterator[Portal]:
        with Portal.serve(
            prepared, KVPORTAL_MAX_BODY_BYTES="100000", KVPORTAL_INTERNAL_API_TOKEN="t"
        ) as portal:
            yield portal.ready()

    def post(self, portal: Portal, content: bytes | Iterator[bytes]) -> httpx.Response:
        headers = {"X-Internal-Token": "t", "Content-Type": "application/json"}
        return httpx.post(portal.url + "/v1/internal/nowhere", content=content, headers=headers, timeout=30)

    def test_a_body_over_the_limit_is_413_whether_or_not_its_length_is_announced(self, portal):
        assert self.post(portal, b" " * 100_001).status_code == 413
        assert self.post(portal, iter([b" " * 50_000, b" " * 50_001])).status_code == 413
        assert self.post(portal, iter([b" " * 65_536] * 1000)).status_code == 413

    def test_a_body_at_the_limit_is_read_whole(self, portal):
        assert self.post(portal, b" " * 100_000).status_code == 404
        assert self.post(portal, iter([b" " * 50_000, b" " * 50_000])).status_code == 404
