"""`make demo` as a person lives it: it comes up, shows real streams, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from scripts.supervisor import dies_with_parent, free_ports
from tests.support.processes import ManagedProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0


def parent_of(pid: int) -> int | None:
    """The parent's pid; None when there is no such process, or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def children_of(parent: int) -> dict[int, str]:
    """Pid -> command line of the processes that `parent` started."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: command_of(pid) for pid in pids if parent_of(pid) == parent}


@dataclass
class RunningDemo:
    process: ManagedProcess
    data_dir: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child(self, words: str) -> int:
        """The pid of the child whose command line contains `words`."""
        return next(pid for pid, command in children_of(self.process.pid).items() if words in command)

    def wait_until_up(self) -> dict[int, str]:
        """Wait for the welcome; the children."""
        wait_until(
            lambda: "Ctrl-C ends the demo" in self.process.output() or not self.process.running,
            START_TIMEOUT,
            lambda: f"the demo did not come up:\n{self.process.tail(40)}",
        )
        assert self.process.running, self.process.tail(40)
        return children_of(self.process.pid)


def assert_all_ended(children: dict[int, str]) -> None:
    """All processes are gone; under PDEATHSIG some may still be on their way out."""
    assert len(children) == 5, children

    def left() -> list[str]:
        return [command for pid, command in children.items() if parent_of(pid) is not None]

    wait_until(lambda: not left(), STOP_TIMEOUT, lambda: f"left behind: {left()}")


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., RunningDemo]]:
    """Start the demo on a free port (or a given one) with a data directory of its own."""
    started: list[ManagedProcess] = []
    data_dir = tmp_path / "var"

    def start(port: int | None = None) -> RunningDemo:
        port = port or free_ports(1)[0]
        # A variable for a real installation must not change the demo.
        env = {**os.environ, "KVPORTAL_DATA_DIR": str(data_dir), "KVPORTAL_INTERNAL_API_TOKEN": "real"}
        command = [sys.executable, "-m", "scripts.demo", "--port", str(port)]
        log = tmp_path / f"demo-{len(started)}.log"
        process = ManagedProcess(command, log, cwd=ROOT, env=env)
        started.append(process)
        return RunningDemo(process, data_dir, port)

    yield start
    for process in started:
        process.stop()


def synchronized(url: str) -> set[str]:
    answer = httpx.post(f"{url}/v1/internal/kv-cache/query", json={"token_ids": []})
    if answer.status_code == 503:  # No engine has registered yet.
        return set()
    matches = answer.raise_for_status().json()["matches"]
    return {
        match["instance_name"] for match in matches if match["synchronized"] and match["device_blocks"] > 0
    }


def test_demo_comes_up_with_login_and_moving_streams_and_ctrl_c_ends_it(
    start_demo: Callable[..., RunningDemo],
) -> None:
    demo = start_demo()
    children = demo.wait_until_up()
    wait_until(
        lambda: len(synchronized(demo.url)) == 3,
        30,
        lambda: f"synchronized: {synchronized(demo.url)}\n{demo.process.tail(40)}",
    )
    before = sequences(demo.url)
    wait_until(lambda: all(new > old for new, old in zip(sequences(demo.url), before, strict=True)), 30)
    assert can_log_in(demo)
    wait_until(lambda: decisions(demo.url) > 0, 30, lambda: demo.process.tail(40))

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(STOP_TIMEOUT) == 0
    assert_all_ended(children)
    assert "all processes have ended" in demo.process.output()


def sequences(url: str) -> list[int]:
    answer = httpx.post(f"{url}/v1/internal/kv-cache/query", json={"token_ids": []})
    return [match["sequence"] or 0 for match in answer.raise_for_status().json()["matches"]]


def decisions(url: str) -> float:
    """Routing decisions made by CAR so far."""
    lines = httpx.get(f"{url}/metrics").raise_for_status().text.splitlines()
    made = 'kvportal_decisions_total{outcome="routed",policy="CAR"} '
    return sum(float(line.removeprefix(made)) for line in lines if line.startswith(made))


def password_in(output: str) -> str:
    match = re.search(r"password\s+(\S+)", output)
    assert match is not None, output
    return match[1]


def can_log_in(demo: RunningDemo) -> bool:
    """Whether the printed login opens the admin."""
    with httpx.Client(base_url=demo.url, headers={"Origin": demo.url}) as client:
        page = client.get("/admin/login/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token is not None, page.text
        form = {
            "username": "admin",
            "password": password_in(demo.process.output()),
            "csrfmiddlewaretoken": token[1],
            "next": "/admin/",
        }
        answer = client.post("/admin/login/", data=form)
        return answer.status_code == 302 and client.get("/admin/").status_code == 200


def test_sigterm_ends_every_process_and_the_next_start_has_the_same_login(
    start_demo: Callable[..., RunningDemo],
) -> None:
    first = start_demo()
    children = first.wait_until_up()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(STOP_TIMEOUT) == 0
    assert_all_ended(children)
    assert (first.data_dir / "admin-password").stat().st_mode & 0o077 == 0

    second = start_demo()
    second.wait_until_up()
    assert password_in(second.process.output()) == password_in(first.process.output())


def test_when_the_portal_dies_it_is_named_and_the_rest_end(start_demo: Callable[..., RunningDemo]) -> None:
    demo = start_demo()
    children = demo.wait_until_up()
    os.kill(demo.child(" serve "), signal.SIGKILL)
    assert demo.process.wait(STOP_TIMEOUT) == 1
    assert_all_ended(children)
    assert "demo: the portal ended with status -9" in demo.process.output()


def test_an_engine_may_be_killed_to_see_what_the_portal_makes_of_it(
    start_demo: Callable[..., RunningDemo],
) -> None:
    demo = start_demo()
    children = demo.wait_until_up()
    wait_until(lambda: len(synchronized(demo.url)) == 3, 30, lambda: demo.process.tail(40))
    os.kill(demo.child("simulate_engine"), signal.SIGKILL)
    wait_until(lambda: len(synchronized(demo.url)) == 2, 30, lambda: demo.process.tail(40))
    wait_until(lambda: re.search(r"demo: engine-\S* ended with status -9", demo.process.output()), 10)
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(STOP_TIMEOUT) == 0
    assert_all_ended(children)


def test_a_taken_port_ends_the_demo_before_it_begins_and_says_so(
    start_demo: Callable[..., RunningDemo],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = start_demo(port)
        assert demo.process.wait(START_TIMEOUT) == 2
    fault = f"demo: PORT: found {port} (Address already in use); allowed: one that is free on 127.0.0.1\n"
    assert demo.process.output() == fault
    assert not demo.data_dir.exists()


@pytest.mark.parametrize("port", ["70000", "0", "abc", "", "-1"])
def test_a_port_that_is_none_is_one_line(port: str) -> None:
    sentence = f"demo: PORT: found {port!r}; allowed: an integer from 1 to 65535"
    for command, output in (
        ([sys.executable, "-m", "scripts.demo", f"--port={port}"], f"{sentence}\n"),
        (["make", "-s", "-o", "setup", "demo", f"PORT={port}", f"PY={sys.executable}"], None),
    ):
        done = subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        [line] = done.stdout.splitlines()
        assert sentence in line
        assert output in (None, done.stdout)


@pytest.mark.skipif(not dies_with_parent("TERM"), reason="setpriv with --pdeathsig is missing")
def test_even_a_killed_demo_leaves_nothing_behind(start_demo: Callable[..., RunningDemo]) -> None:
    demo = start_demo()
    children = demo.wait_until_up()
    demo.process.kill()
    assert_all_ended(children)


def test_the_gateway_outlives_an_answer_that_breaks_off(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as portal:
        portal.settimeout(START_TIMEOUT)
        url = f"http://127.0.0.1:{portal.getsockname()[1]}"
        gateway = ManagedProcess(
            [sys.executable, "-m", "scripts.demo_gateway", url], tmp_path / "gateway.log", cwd=ROOT
        )
        try:
            for _ in range(2):
                client, _ = portal.accept()
                with client:
                    client.recv(65536)
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            assert gateway.running, gateway.tail()
        finally:
            gateway.kill()
