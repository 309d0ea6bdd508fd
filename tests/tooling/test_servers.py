"""The shared server fixtures themselves: what other tests lean on when they kill, freeze and restart."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import psycopg
import pytest
import redis

from scripts.supervisor import dies_with_parent, free_ports
from tests.support.processes import (
    EtcdServer,
    ManagedProcess,
    PostgresServer,
    RedisServer,
    accepts_connections,
)
from tests.support.waiting import wait_until


def etcd_call(server: EtcdServer, path: str, body: dict[str, str], timeout: float = 5) -> dict[str, object]:
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in body.items()}
    request = Request(f"{server.url}/v3/kv/{path}", data=json.dumps(encoded).encode())
    with urlopen(request, timeout=timeout) as answer:
        parsed: dict[str, object] = json.load(answer)
        return parsed


def stored(server: EtcdServer, key: str) -> str | None:
    kvs = etcd_call(server, "range", {"key": key}).get("kvs")
    return base64.b64decode(kvs[0]["value"]).decode() if isinstance(kvs, list) else None


def test_etcd_keeps_its_data_and_port_over_a_kill(etcd_server: EtcdServer) -> None:
    endpoint = etcd_server.endpoint
    etcd_call(etcd_server, "put", {"key": "a", "value": "1"})
    etcd_server.kill()
    assert not accepts_connections(etcd_server.ports[0])
    etcd_server.start()
    assert etcd_server.endpoint == endpoint
    assert stored(etcd_server, "a") == "1"


def test_frozen_etcd_accepts_connections_but_answers_nothing(etcd_server: EtcdServer) -> None:
    etcd_server.freeze()
    assert accepts_connections(etcd_server.ports[0])
    with pytest.raises(TimeoutError):
        etcd_call(etcd_server, "range", {"key": "a"}, timeout=0.3)
    etcd_server.thaw()
    wait_until(lambda: etcd_server.ready(), message="etcd did not wake up")


def test_a_frozen_server_can_be_stopped(redis_server: RedisServer) -> None:
    redis_server.freeze()
    redis_server.stop()
    assert not accepts_connections(redis_server.ports[0])


def test_redis_answers(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.set("a", "1")
        assert client.get("a") == b"1"


def test_postgres_answers_and_lets_databases_be_made(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE of_this_test")
    with psycopg.connect(postgres.url("of_this_test")) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("of_this_test",)


def test_chromium_can_be_run(chromium: str) -> None:
    assert os.access(chromium, os.X_OK)


def test_a_taken_port_makes_the_server_try_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import processes
    from tests.support.programs import find_program

    if find_program("redis-server") is None:
        pytest.skip("covered where redis-server is installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        offered = [[taken.getsockname()[1]]]
        real = free_ports
        monkeypatch.setattr(processes, "free_ports", lambda n: offered.pop() if offered else real(n))
        with RedisServer(tmp_path) as server:
            assert server.ports[0] != taken.getsockname()[1]


@pytest.mark.skipif(not dies_with_parent("KILL"), reason="setpriv with --pdeathsig is missing")
def test_a_server_does_not_outlive_a_killed_test_process(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from tests.support.processes import ManagedProcess\n"
        "child = ManagedProcess(['sleep', '600'], Path('log'))\n"
        "print(child.pid, flush=True)\n"
        "child.wait(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # Until setpriv has become the program, nothing ties it to its parent.
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        parent.kill()
    wait_until(lambda: not runs(child), message=f"process {child} still runs")


def runs(pid: int) -> bool:
    """Whether a process that is not ours to reap is alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_process_that_ignores_sigterm_is_killed_after_the_deadline(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = ManagedProcess([sys.executable, "-c", code], tmp_path / "log")
    wait_until(lambda: "up" in process.output())
    assert process.stop(timeout=0.2) == -signal.SIGKILL
