"""A decision reads nothing but memory: everything else is broken, and decisions are made all the same."""

from __future__ import annotations

import base64
import json
import socket
import sqlite3
import threading
from array import array
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
import zmq
from django.db.backends.base.base import BaseDatabaseWrapper

import routing.decision_log as log_module
from routing.decision_log import DecisionLog
from routing.decision_store import DecisionStore
from routing.instances.etcd import EtcdSettings
from routing.instances.sources import Instances
from routing.policies.decision import Policy, Settings
from routing.request_metrics import Action, Report
from routing.selector import Selector
from streams.directory import Directory
from streams.simulator import SimulatedEngine
from streams.spec import Limits
from streams.status import StreamState
from tests.support.processes import EtcdServer
from tests.support.waiting import wait_until

TOKENS = list(range(64))
PROMPT = array("I", TOKENS).tobytes()
ROLES = {"DEFAULT": 0, "PREFILL": 1, "DECODE": 2, "MIX": 3}


def put(etcd: EtcdServer, key: str, value: dict[str, Any]) -> None:
    pair = {"key": key, "value": json.dumps(value)}
    body = {name: base64.b64encode(text.encode()).decode() for name, text in pair.items()}
    with urlopen(Request(f"{etcd.url}/v3/kv/put", data=json.dumps(body).encode()), timeout=5) as answer:
        assert answer.status == 200


def register(etcd: EtcdServer, name: str, role: str, waiting: int) -> None:
    registration = {"name": name, "incarnation_id": f"life of {name}", "type": ROLES[role], "dp_size": 1}
    put(etcd, f"XLLM:{role}:{name}", registration)
    load = {"waiting_requests_num": waiting, "gpu_cache_usage_perc": 0.5}
    put(etcd, f"XLLM:LOADMETRICS:{name}", load)


@pytest.fixture
def instances(etcd_server: EtcdServer) -> Iterator[Instances]:
    found = Instances.from_etcd(EtcdSettings(endpoints=(etcd_server.endpoint,)))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def directory() -> Iterator[Directory]:
    found = Directory(Limits())
    found.start()
    yield found
    found.stop()


def forbid_everything_outside_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on this thread can neither use a socket, a file or a database, nor wait for another
    thread. What it tried is in the list."""
    deciding, tried = threading.get_ident(), []

    def guard(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == deciding:
                tried.append(f"{owner.__name__}.{name}")
                raise AssertionError(f"a decision used {owner.__name__}.{name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for name in (
        "connect",
        "connect_ex",
        "send",
        "sendall",
        "sendto",
        "recv",
        "recv_into",
        "recvfrom",
        "accept",
    ):
        guard(socket.socket, name)
    for name in ("send", "recv", "send_multipart", "recv_multipart", "poll", "connect"):
        guard(zmq.Socket, name)
    for name in ("connect", "cursor", "ensure_connection"):
        guard(BaseDatabaseWrapper, name)
    guard(sqlite3, "connect")
    guard(socket, "create_connection")
    guard(threading.Event, "wait")
    guard(threading.Condition, "wait")
    return tried


@pytest.mark.parametrize("policy", list(Policy))
def test_a_thousand_decisions_with_sockets_etcd_and_database_broken(
    policy, etcd_server, instances, directory, monkeypatch
):
    monkeypatch.setattr(log_module, "FLUSH_SECONDS", 0.005)
    for name, role, waiting in (("p:1", "PREFILL", 1), ("q:1", "PREFILL", 2), ("d:1", "DECODE", 1)):
        register(etcd_server, name, role, waiting)
    registry = instances.registry
    wait_until(lambda: [i.name for i in registry.snapshot().instances if i.load] == ["p:1", "q:1", "d:1"])
    # The database refuses everything: pytest-django lets nobody in without its mark.
    log = DecisionLog(DecisionStore(), explain_share=0.5, queued=500)
    log.start()
    chosen = Selector(Settings(policy=policy), registry, directory, log)

    with SimulatedEngine(block_size=4) as engine:
        engine.ranks[0].store(TOKENS)
        directory.set_desired([engine.spec(instance_name="q:1", incarnation="life of q:1")])
        wait_until(lambda: [m.device_hit_tokens for m in directory.query(PROMPT)] == [64], 20)
        first = name_of(chosen)
        assert first == "q:1" or policy is not Policy.CAR
    etcd_server.kill()
    wait_until(lambda: directory.statuses()[0].state is not StreamState.SYNCHRONIZED, 20)
    wait_until(lambda: not instances.source.status().connected, 20)
    wait_until(lambda: log.health().error is not None, 20)

    with monkeypatch.context() as patch:
        tried = forbid_everything_outside_memory(patch)
        names = [name_of(chosen, str(number)) for number in range(1000)]
        for number in range(1000):
            chosen.report(str(number), Report(Action.FINISH_DECODE), cached_tokens=1)
    assert tried == []
    assert set(names) == ({"p:1"} if policy is Policy.CAR else {"p:1", "q:1"})
    health = log.health()
    assert health.written == 0
    assert health.queued <= 500
    log.stop()
    assert log.health().dropped == 1 + 1000 + 1000  # decisions and feedback, every one of them counted


def name_of(selector: Selector, request_id: str | None = None) -> str:
    prefill = selector.select(PROMPT, request_id).decision.prefill
    assert prefill is not None
    return prefill.instance.name
