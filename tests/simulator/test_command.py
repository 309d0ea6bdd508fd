"""`manage.py simulate_engine` as a process of its own."""

from __future__ import annotations

import random
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from django.core.management import CommandParser

from kvportal.management.commands.simulate_engine import Command
from routing.instances.model import Role
from tests.simulator.peers import END, peer
from tests.simulator.test_registration import RegistryServer
from tests.support.processes import ManagedProcess
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0


class Running:
    """One command, and what it said about itself."""

    def __init__(self, log: Path, *flags: str) -> None:
        command = [sys.executable, "manage.py", "simulate_engine", *flags]
        self.process = ManagedProcess(command, log, cwd=CHECKOUT)

    def until(self, pattern: str) -> re.Match[str]:
        """The first match in its output; fails when it ends without one."""

        def found() -> re.Match[str] | None:
            running = self.process.running
            match = re.search(pattern, self.process.output())
            assert match or running, f"it ended:\n{self.process.tail()}"
            return match

        match = wait_until(found, START_TIMEOUT, lambda: f"no {pattern!r} in:\n{self.process.tail()}")
        assert match is not None
        return match

    @property
    def url(self) -> str:
        return self.until(r"health (http://\S+)/health")[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def run(*flags: str) -> Running:
        started.append(Running(tmp_path / f"engine-{len(started)}.log", *flags))
        return started[-1]

    yield run
    for each in started:
        each.process.stop()


def test_it_publishes_serves_snapshots_and_health_and_takes_orders_until_sigterm(
    start: Callable[..., Running],
) -> None:
    flags = ("--dp-size=2", "--rate=500", "--block-size=16", "--topic=kv", "--first-sequence=100")
    engine = start("--name=engine-1", "--status-interval=0.2", *flags)
    url = engine.url
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        rank = client.get("/state").json()["ranks"][1]
        with peer() as reader:
            reader.connect(rank["endpoint"], "kv")
            first = reader.receive()
            assert first[0] == b"kv"
            assert int.from_bytes(first[1], "big") >= 100
            body, end = reader.snapshot_from(rank["replay_endpoint"])
            assert int.from_bytes(body[1], "big") >= 100
            assert end[1] == END
        assert client.post("/faults", json={"fault": "health", "mode": "error"}).status_code == 200
        assert client.get("/health").status_code == 503
    engine.until(r"engine-1: [\d,]+ device and [\d,]+ host blocks; next sequence \d+, \d+")
    port = int(url.rpartition(":")[2])
    assert rank["endpoint"].endswith(f":{port + 10_001}")
    assert rank["replay_endpoint"].endswith(f":{port + 30_001}")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(STOP_TIMEOUT) == 0
    assert engine.process.output().rstrip().endswith("engine-1: stopped")
    assert "Traceback" not in engine.process.output()


def test_it_registers_over_http_and_ctrl_c_withdraws_it(start: Callable[..., Running]) -> None:
    portal = RegistryServer()
    portal.start()
    try:
        engine = start("--register=http", f"--portal={portal.url}", "--role=mix", "--heartbeat-interval=0.1")
        name = engine.url.removeprefix("http://")
        wait_until(lambda: (each := portal.instance(name)) and each.load, START_TIMEOUT)
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(STOP_TIMEOUT) == 0
        wait_until(lambda: (each := portal.instance(name)) and not each.registered)
    finally:
        portal.stop()


def test_endpoints_of_ones_own_and_a_portal_that_is_away(start: Callable[..., Running]) -> None:
    first = start("--rate=0", "--name=one")
    taken = first.until(r"events (tcp://\S+), snapshots (tcp://\S+),")
    second = start(f"--endpoint={taken[1]}", f"--replay-endpoint={taken[2]}")
    assert second.process.wait(START_TIMEOUT) == 1
    assert f"cannot listen on {taken[1]}" in second.process.output()
    assert "Traceback" not in second.process.output()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(STOP_TIMEOUT) == 0
    third = start(
        f"--endpoint={taken[1]}", f"--replay-endpoint={taken[2]}", "--name=two", "--register=http",
        "--portal=http://127.0.0.1:9",
    )  # fmt: skip
    third.until(rf"two: rank 0: events {taken[1]}, snapshots {taken[2]}")
    third.until(r"two: cannot register or report: http://127.0.0.1:9: ")
    third.process.send_signal(signal.SIGTERM)
    assert third.process.wait(STOP_TIMEOUT) == 0


def test_a_taken_http_port_ends_it_and_says_so(start: Callable[..., Running]) -> None:
    # Behind the ports that the system hands out, so that nobody takes these two meanwhile.
    events, replay = random.sample(range(61_000, 65_536), 2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        offsets = (f"--event-port-offset={events - port}", f"--replay-port-offset={replay - port}")
        engine = start(f"--port={port}", *offsets)
        assert engine.process.wait(START_TIMEOUT) == 1
    assert f"cannot listen on http://127.0.0.1:{port}" in engine.process.output()


@pytest.fixture
def parser() -> CommandParser:
    return Command().create_parser("manage.py", "simulate_engine")


def test_every_flag_has_a_help_text_with_its_default(parser: CommandParser) -> None:
    assert all(action.help for action in parser._actions)
    text = " ".join(parser.format_help().split())
    assert "--offload-delay" in text
    assert "events per second over all ranks; 0: none (a number from 0 to 1e+06; default: 50)" in text
    assert "role to register with (default, prefill, decode, mix; default: default)" in text
    assert "default: 127.0.0.1:2379)" in text
    assert "prefix of all keys in etcd (printable text; default: none)" in text
    assert parser.parse_args([]).role is Role.DEFAULT


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rate=-1"], "--rate: found '-1'; allowed: a number from 0"),
        (["--rate=nan"], "--rate: found 'nan'"),
        (["--port=65536"], "--port: found '65536'; allowed: an integer from 0 to 65535"),
        (["--dp-size=0"], "--dp-size: found '0'"),
        (["--block-size=x"], "--block-size: found 'x'"),
        (["--role=leader"], "--role: found 'leader'; allowed: default, prefill, decode, mix"),
        (["--register=redis"], "--register: found 'redis'; allowed: none, etcd or http"),
        (["--hash-form=short"], "--hash-form: found 'short'; allowed: unsigned, signed or bytes"),
        (["--watermark=first"], "--watermark: found 'first'; allowed: last or next"),
        (["--name=two words"], "--name: found 'two words'"),
        (["--host=no host"], "--host: found 'no host'"),
        (["--endpoint=tcp://*:1"], "--endpoint: found 'tcp://*:1'; allowed: tcp://host:port"),
        (["--portal=127.0.0.1:8888"], "--portal: found '127.0.0.1:8888'; allowed: http://host:port"),
        (["--portal=http://host:port"], "--portal: found"),
        (["--etcd-addr=here"], "--etcd-addr: found 'here'"),
        (["--orphan-probability=2"], "--orphan-probability: found '2'"),
        (["--endpoint=tcp://127.0.0.1:1"], "--endpoint and --replay-endpoint: give both or neither"),
        (
            ["--endpoint=tcp://127.0.0.1:1", "--replay-endpoint=tcp://127.0.0.2:2"],
            "--endpoint and --replay-endpoint: must name the same host",
        ),
        (["--ttl=1"], "--ttl: must be longer than --heartbeat-interval"),
        (["--replay-port-offset=10000"], "--replay-port-offset: must differ from --event-port-offset"),
        (["--port=40000"], "--port: with these offsets and --dp-size, at most 35535 is allowed"),
        (["--event-port-offset=64000"], "--port: with these offsets and --dp-size, one must be named"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(
    parser: CommandParser, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command()
    with pytest.raises(SystemExit) as ended:
        command.run_from_argv(["manage.py", "simulate_engine", *flags])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path, start: Callable[..., Running]) -> None:
    empty = tmp_path / "token"
    empty.write_text("\n# none yet\n")
    engine = start("--register=http", f"--portal-token-file={empty}")
    assert engine.process.wait(START_TIMEOUT) == 2
    assert f"--portal-token-file: {empty} is empty" in engine.process.output()
