"""Real servers for tests: etcd, Redis, PostgreSQL, each on free loopback ports, each ended by its pid.

Every class can be used as a context manager, and can be killed, frozen and started again on the same ports
and data, because that is what the code under test has to live through.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.request import Request, urlopen

import psycopg

from scripts.supervisor import dies_with_parent, free_ports
from tests.support.programs import find_program, missing_text
from tests.support.waiting import wait_until

START_TIMEOUT = 30.0
STOP_TIMEOUT = 10.0
PORT_ATTEMPTS = 5


def accepts_connections(port: int) -> bool:
    """Whether something listens on this loopback port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


class ManagedProcess:
    """One child process, its output kept in a file, ended by its own pid and by nothing else."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [*dies_with_parent("KILL"), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                cwd=cwd,
                user=user,
                group=None if user is None else pwd.getpwnam(user).pw_gid,
                extra_groups=None if user is None else (),
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs; asking reaps."""
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self.returncode is None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 20) -> str:
        """The last lines of the output, for the message of a failure."""
        return "\n".join(self.output().splitlines()[-lines:])

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout: float) -> int:
        """The exit status; fails the test, with the last output, when it does not end in time."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.command[0]} still runs after {timeout:g} s; last output:\n{self.tail()}"
            ) from None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers. Returns once every thread stands still: until then
        it might still answer."""
        self.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_until(lambda: all(_stands_still(task / "stat") for task in tasks.iterdir()))

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self._popen.kill()
        self._popen.wait()

    def stop(self, timeout: float = STOP_TIMEOUT, stop_signal: int = signal.SIGTERM) -> int:
        """Ask it to end, insist after `timeout` seconds. A frozen process is woken up first."""
        if self.running:
            self.send_signal(stop_signal)
            self.thaw()
            try:
                self._popen.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._popen.wait()


def _stands_still(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


class Server:
    """A server program with data of its own, on ports of its own.

    Subclasses name the program, prepare the data and give the command line and the readiness test.
    """

    program: str
    ports_needed = 1
    stop_signal = signal.SIGTERM

    def __init__(self, directory: Path) -> None:
        path = find_program(self.program)
        if path is None:
            raise FileNotFoundError(missing_text([self.program]))
        self.executable = Path(path)
        self.directory = directory
        self.log = directory / f"{self.program}.log"
        self.ports: list[int] = []
        self.process: ManagedProcess | None = None

    def command(self) -> list[str | Path]:
        raise NotImplementedError

    def ready(self) -> bool:
        return accepts_connections(self.ports[0])

    def user(self) -> str | None:
        """The user to run as, None for the current one."""
        return None

    def start(self) -> Self:
        """Start, or start again on the same ports and data, and wait until it answers."""
        if self.ports:
            if not self._launch():
                raise AssertionError(f"{self.program} did not start again:\n{self._tail()}")
            return self
        for _ in range(PORT_ATTEMPTS):
            self.ports = free_ports(self.ports_needed)
            if self._launch():
                return self
        raise AssertionError(f"{self.program} did not start:\n{self._tail()}")

    def _launch(self) -> bool:
        """Whether it came up; False when it ended by itself, as it does when a port is taken."""
        process = self.process = ManagedProcess(self.command(), self.log, user=self.user())
        try:
            wait_until(
                lambda: not process.running or self.ready(),
                START_TIMEOUT,
                lambda: f"{self.program} does not answer:\n{process.tail()}",
                interval=0.02,
            )
        except BaseException:
            process.kill()
            raise
        return process.running

    def _tail(self) -> str:
        return "" if self.process is None else self.process.tail()

    def _running(self) -> ManagedProcess:
        if self.process is None:
            raise RuntimeError(f"{self.program} was never started")
        return self.process

    def stop(self) -> None:
        """End it in its own orderly way. Harmless when it is not running."""
        if self.process is not None:
            self.process.stop(stop_signal=self.stop_signal)

    def kill(self) -> None:
        """SIGKILL: as if the machine lost power, apart from what the system had buffered."""
        self._running().kill()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers; `thaw` ends it."""
        self._running().freeze()

    def thaw(self) -> None:
        self._running().thaw()

    def restart(self) -> None:
        """Stop, then start on the same ports and data."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class EtcdServer(Server):
    """A single etcd member. `endpoint` is `127.0.0.1:port`, as `--etcd-addr` wants it."""

    program = "etcd"
    ports_needed = 2

    def __init__(self, directory: Path, *extra_flags: str) -> None:
        super().__init__(directory)
        self.extra_flags = extra_flags

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"

    def command(self) -> list[str | Path]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self.ports)
        return [
            self.executable,
            *("--name", "test", "--data-dir", self.directory / "etcd"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"test={peer}", "--logger", "zap", "--log-outputs", "stderr"),
            *self.extra_flags,
        ]

    def ready(self) -> bool:
        """Whether a write-path request is answered: the port opens before a leader is elected."""
        request = Request(f"{self.url}/v3/kv/range", data=b'{"key": "AA=="}')
        try:
            with urlopen(request, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class RedisServer(Server):
    """A Redis that keeps nothing on disk."""

    program = "redis-server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.ports[0]}/0"

    def command(self) -> list[str | Path]:
        return [
            self.executable,
            *("--bind", "127.0.0.1", "--port", str(self.ports[0]), "--dir", self.directory),
            *("--save", "", "--appendonly", "no"),
        ]


class PostgresServer(Server):
    """A PostgreSQL cluster made with `initdb`, without durability, run as an ordinary user.

    PostgreSQL refuses to run as root, so under root it runs as `postgres`, or `nobody` where that user
    does not exist. `directory` must be one that this user can reach.
    """

    program = "postgres"
    stop_signal = signal.SIGINT  # "fast shutdown": SIGTERM would wait for the clients

    def user(self) -> str | None:
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in names else "nobody"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url(self, database: str = "postgres") -> str:
        """As `KVPORTAL_DATABASE_URL` wants it."""
        return f"postgres://portal@127.0.0.1:{self.ports[0]}/{database}"

    def ready(self) -> bool:
        """Whether a client is let in: the port opens before the database has started."""
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def start(self) -> Self:
        if not self.data.exists():
            self._initialise()
        return super().start()

    def _initialise(self) -> None:
        user = self.user()
        if user is not None:
            os.chown(self.directory, pwd.getpwnam(user).pw_uid, -1)
        initdb = self.executable.with_name("initdb")
        command: list[str | Path] = [
            *(initdb, "--pgdata", self.data, "--username", "portal", "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        ]
        status = ManagedProcess(command, self.log, user=user, cwd=self.directory).wait(60)
        if status != 0:
            raise AssertionError(f"initdb failed:\n{self.log.read_text(errors='replace')}")

    def command(self) -> list[str | Path]:
        return [
            *(self.executable, "-D", self.data, "-p", str(self.ports[0]), "-h", "127.0.0.1"),
            *("-k", self.directory, "-c", "fsync=off", "-c", "full_page_writes=off"),
        ]


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """A temporary directory that other users may enter; pytest's own belong to the current user alone."""
    path = Path(tempfile.mkdtemp(prefix="kvportal-"))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
