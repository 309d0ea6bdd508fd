"""Twenty clients ask without a pause while streams flap, instances come and go and loads change.

What is true at any time is known to the one thread that changes it: it notes when an instance was
certainly up and certainly down. Every answer is held against these notes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from routing.endpoints import progress_endpoint, select_endpoint
from routing.instances.core import Deleted, HealthSettings, Registered
from routing.instances.model import HealthState, LoadReport, Registration, Role
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from routing.policies.decision import Policy, Settings
from routing.request_metrics import Counts
from routing.selector import Selector
from streams.directory import Directory
from streams.simulator import SimulatedEngine
from streams.spec import Limits
from tests.http import shells
from tests.http.servers import served
from tests.support.waiting import wait_until

SECONDS = 10.0
"""For each of the three policies."""
CLIENTS = 20
TOKENS = list(range(256))
ROLES = {
    "127.0.0.1:1": Role.DEFAULT,
    "127.0.0.1:2": Role.PREFILL,
    "127.0.0.1:3": Role.PREFILL,
    "127.0.0.1:4": Role.DECODE,
    "127.0.0.1:5": Role.DECODE,
    "127.0.0.1:6": Role.MIX,
}
WITH_STREAMS = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


@dataclass
class Notes:
    """Spans of time in which an instance was certainly up, or certainly down."""

    up: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in ROLES})
    down: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in ROLES})

    def certainly(
        self, spans: dict[str, list[tuple[float, float]]], name: str, begun: float, ended: float
    ) -> bool:
        return any(start <= begun and ended <= end for start, end in spans[name])


class Churn:
    """The only one that changes instances, and knows therefore what is true."""

    def __init__(self, registry: InstanceRegistry, seed: int) -> None:
        self.registry = registry
        self.random = random.Random(seed)
        self.notes = Notes()
        self.lives = dict.fromkeys(ROLES, 0)
        self.since = dict.fromkeys(ROLES, time.monotonic())
        self.is_up = dict.fromkeys(ROLES, False)

    def identity(self, name: str) -> str:
        return f"{name}#{self.lives[name]}"

    def rise(self, name: str) -> None:
        """Register a new life, or let the old one come back; up once it has its load."""
        self.notes.down[name].append((self.since[name], time.monotonic()))
        if name not in self.registry.snapshot().by_name or self.random.random() < 0.5:
            self.lives[name] += 1
        else:
            self.load(name)  # a heartbeat makes it LEASE_LOST
        registration = Registration(name, ROLES[name], incarnation_id=self.identity(name))
        self.registry.apply([Registered(registration)])
        self.load(name)
        self.is_up[name], self.since[name] = True, time.monotonic()

    def fall(self, name: str) -> None:
        """Its key is deleted and nobody answers at its address: SUSPECT."""
        self.notes.up[name].append((self.since[name], time.monotonic()))
        self.registry.apply([Deleted(name)])
        wait_until(lambda: self.state(name) in (HealthState.SUSPECT, None), interval=0.001)
        self.is_up[name], self.since[name] = False, time.monotonic()

    def state(self, name: str) -> HealthState | None:
        view = self.registry.snapshot().by_name.get(name)
        return None if view is None else view.state

    def load(self, name: str) -> None:
        report = LoadReport(self.random.randrange(20), self.random.random())
        self.registry.heartbeat(name, self.identity(name), report)

    def step(self) -> None:
        name = self.random.choice(list(ROLES))
        kind = self.random.random()
        if kind < 0.03:
            for one in ROLES:  # all at once: now `no_candidates` is true
                if self.is_up[one]:
                    self.fall(one)
            time.sleep(0.2)  # a while of this
        elif not self.is_up[name]:
            self.rise(name)
        elif kind < 0.3:
            self.fall(name)
        else:
            self.load(name)

    def finish(self) -> None:
        now = time.monotonic()
        for name, spans in ((n, (self.notes.up if self.is_up[n] else self.notes.down)[n]) for n in ROLES):
            spans.append((self.since[name], now))


@dataclass
class Asked:
    """One question and its answer."""

    begun: float
    ended: float
    status: int
    body: dict[str, Any]


class Gateway(threading.Thread):
    """Asks, reports, finishes, cancels or forgets, until it is told to stop."""

    def __init__(self, url: str, number: int, over: threading.Event) -> None:
        super().__init__(name=f"gateway-{number}")
        self.url = url
        self.random = random.Random(number)
        self.number = number
        self.over = over
        self.asked: list[Asked] = []
        self.failed_reports: list[int] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.Client(
                base_url=self.url, headers={"X-Internal-Token": shells.TOKEN}, timeout=20
            ) as client:
                count = 0
                while not self.over.is_set():
                    count += 1
                    self.serve(client, f"{self.number}-{count}")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.failure = error

    def serve(self, client: httpx.Client, request_id: str) -> None:
        tokens = TOKENS[: self.random.choice([0, 100, 256])]
        body = {"token_ids": tokens, "request_id": request_id, "explain": self.random.random() < 0.1}
        begun = time.monotonic()
        answer = client.post("/v1/internal/routing/select", json=body)
        self.asked.append(Asked(begun, time.monotonic(), answer.status_code, answer.json()))
        if answer.status_code != 200:
            self.over.wait(0.01)
            return
        for action in self.random.choice(
            [["FINISH_PREFILL", "GENERATE", "FINISH_DECODE"], ["FINISH_DECODE"], ["CANCEL"], ["GENERATE"], []]
        ):
            report = {"action": action, "num_generated_tokens": self.random.randrange(50), "cached_tokens": 4}
            answer = client.post(f"/v1/internal/routing/requests/{request_id}/progress", json=report)
            if answer.status_code != 204:
                self.failed_reports.append(answer.status_code)


def flap(engines: list[SimulatedEngine], chance: random.Random) -> None:
    """Give one stream a reason to lose its synchronization, or new events."""
    engine = chance.choice(engines)
    fault = chance.random()
    if fault < 0.3:
        engine.skip_sequence()
    elif fault < 0.4:
        engine.drop_connection(wait=False)
    engine.step(2, wait=False)


@contextmanager
def world() -> Iterator[tuple[InstanceRegistry, Directory, list[SimulatedEngine]]]:
    """A registry without mercy, a directory, and engines that publish."""
    registry = InstanceRegistry(
        HealthSettings(lease_lost_heartbeat_timeout=600, suspect_timeout=0.3),
        ProbeSettings(timeout=0.5, attempts=1),
    )
    directory = Directory(Limits(resync_interval_ms=500))
    engines = [SimulatedEngine(seed=number, block_size=4) for number, _ in enumerate(WITH_STREAMS)]
    registry.start()
    directory.start()
    try:
        for engine in engines:
            engine.ranks[0].store(TOKENS)
        yield registry, directory, engines
    finally:
        directory.stop()
        registry.stop()
        for engine in engines:
            engine.close()


def disturb(churn: Churn, directory: Directory, engines: list[SimulatedEngine], until: float) -> None:
    """Change everything until then, on this thread."""
    chance = random.Random(4)
    followed: list[str] = []
    while time.monotonic() < until:
        churn.step()
        flap(engines, chance)
        wanted = [name for name in WITH_STREAMS if churn.is_up[name]]
        lives = [churn.identity(name) for name in wanted]
        if lives != followed:
            followed = lives
            pairs = [(name, engines[WITH_STREAMS.index(name)]) for name in wanted]
            directory.set_desired([e.spec(instance_name=n, incarnation=churn.identity(n)) for n, e in pairs])
        time.sleep(0.01)  # the rate of change
    churn.finish()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's log line for each request would cost more than the request."""
    monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)


@pytest.mark.parametrize("policy", list(Policy))
def test_every_answer_is_right_while_everything_changes(policy):
    over = threading.Event()
    with world() as (registry, directory, engines):
        chosen = Selector(Settings(policy=policy), registry, directory, expiry_seconds=2.0)
        churn = Churn(registry, seed=3)
        endpoints = {
            "select": select_endpoint(chosen, max_query_tokens=shells.MAX_TOKENS),
            "progress": progress_endpoint(chosen),
        }
        with shells.portal(endpoints=endpoints), served(shells.MAX_BODY) as url:
            clients = [Gateway(url, number, over) for number in range(CLIENTS)]
            for client in clients:
                client.start()
            try:
                disturb(churn, directory, engines, time.monotonic() + SECONDS)
            finally:
                over.set()
                for client in clients:
                    client.join(30)
        assert [client.failure for client in clients if client.failure] == []
        assert [status for client in clients for status in client.failed_reports] == []
        check([asked for client in clients for asked in client.asked], churn.notes, policy)
        wait_until(lambda: chosen.open_request_num() == 0, 30)
        assert set(chosen.counts().values()) <= {Counts()}


def check(answers: list[Asked], notes: Notes, policy: Policy) -> None:
    """Every answer against what was certainly true while it was made."""
    routed = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(routed) > 100
    assert len(refused) > 10
    for answer in routed:
        for side in ("prefill", "decode"):
            name = (answer.body[side] or {}).get("instance_name")
            assert name is None or not notes.certainly(notes.down, name, answer.begun, answer.ended), answer
    for answer in refused:
        assert (answer.status, answer.body["error"]["code"]) == (503, "no_candidates")
        up = {name for name in ROLES if notes.certainly(notes.up, name, answer.begun, answer.ended)}
        assert not could_serve(up, policy), answer
    if policy is Policy.CAR:
        assert any(answer.body["prefill"]["kv_hit_ratio"] > 0 for answer in routed)


def could_serve(up: set[str], policy: Policy) -> bool:
    """Whether these instances, and any others, must be able to take every request."""
    decode = {name for name in up if ROLES[name] is Role.DECODE}
    prefill = {name for name in up if ROLES[name] in (Role.DEFAULT, Role.PREFILL)}
    alone = {name for name in up if ROLES[name] is Role.DEFAULT}
    return bool(prefill and decode) or bool(alone and policy is not Policy.SLO_AWARE)
