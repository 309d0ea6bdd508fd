from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvportal import live as live_module
from kvportal.live import KEEPALIVE_SECONDS, Live, Subscriber
from kvportal.opsstate import Banner
from kvportal.records import ReplicaView
from kvportal.trends import Totals
from streams.spec import StreamId
from streams.status import StreamStatus
from tests.admin.values import NOW, Clock, lost, status


class FakeSource:
    """What a test says it is."""

    def __init__(self, *statuses: StreamStatus) -> None:
        self.now_statuses = statuses
        self.now_extras: dict[str, Any] = {}

    def statuses(self) -> tuple[StreamStatus, ...]:
        return self.now_statuses

    def totals(self) -> Totals:
        return Totals()

    def banners(self) -> Sequence[Banner]:
        return ()

    def replicas(self) -> tuple[Sequence[ReplicaView], frozenset[str]]:
        return (), frozenset()

    def last_hits(self) -> tuple[Mapping[StreamId, float], float | None]:
        return {}, None

    def extras(self) -> Mapping[str, Any]:
        return self.now_extras


class Page:
    """A browser that acknowledges only when it is told to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.subscriber = Subscriber(self._take)

    async def _take(self, text: str) -> None:
        self.texts.append(text)

    @property
    def versions(self) -> list[int]:
        return [json.loads(text)["version"] for text in self.texts]

    def acknowledge(self) -> None:
        self.subscriber.acknowledge(self.versions[-1])


async def settle() -> None:
    """Let callbacks and tasks that are due run."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(status())


@pytest.fixture
def live(source: FakeSource, clock: Clock) -> Live:
    return Live(source, "here", clock=clock)


async def opened(live: Live) -> Page:
    page = Page()
    live.subscribe(page.subscriber)
    page.subscriber.offer_full(*live.full())
    await settle()
    page.acknowledge()
    return page


async def test_page_gets_everything_first_and_then_what_changes(
    live: Live, source: FakeSource, clock: Clock
) -> None:
    live.sample()
    page = await opened(live)
    first = json.loads(page.texts[0])
    assert first["type"] == "state"
    assert first["now"] == NOW
    assert len(first["series"]["at"]) == 1
    source.now_statuses = (lost(),)
    clock.now += 1
    live.sample()
    await settle()
    second = json.loads(page.texts[1])
    assert second["streams"][0]["state"] == "unsynchronized"
    assert "series" not in second
    assert second["version"] > first["version"]


async def test_nothing_is_sent_while_nothing_changes_except_a_sign_of_life(live: Live, clock: Clock) -> None:
    for _ in range(6):  # until rates are known
        live.sample()
        clock.now += 1
    page = await opened(live)
    live.sample()
    await settle()
    page.acknowledge()
    sent = len(page.texts)
    for _ in range(int(KEEPALIVE_SECONDS) - 2):
        clock.now += 1
        live.sample()
        await settle()
    assert len(page.texts) == sent
    clock.now += 3
    live.sample()
    await settle()
    assert len(page.texts) == sent + 1
    assert json.loads(page.texts[-1])["now"] == clock.now


async def test_sleeping_page_gets_the_newest_state_alone_when_it_wakes(
    live: Live, source: FakeSource, clock: Clock
) -> None:
    page = await opened(live)
    for number in range(100):
        source.now_statuses = (status(device_blocks=number),)
        clock.now += 1
        live.sample()
        await settle()
    assert len(page.texts) == 2  # the full one, and one that was never acknowledged
    page.acknowledge()
    await settle()
    assert len(page.texts) == 3
    assert json.loads(page.texts[-1])["streams"][0]["device"] == 99


async def test_all_pages_share_one_text(
    live: Live, source: FakeSource, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [await opened(live) for _ in range(10)]
    calls = []
    dumps = live_module.orjson.dumps
    monkeypatch.setattr(live_module.orjson, "dumps", lambda value: calls.append(1) or dumps(value))
    source.now_statuses = (lost(),)
    clock.now += 1
    live.sample()
    await settle()
    assert len(calls) == 1
    assert len({id(page.texts[-1]) for page in pages}) == 1


async def test_page_that_opens_does_not_swallow_a_change_for_the_others(
    live: Live, source: FakeSource, clock: Clock
) -> None:
    early = await opened(live)
    source.now_statuses = (lost(),)
    await opened(live)
    clock.now += 1
    live.sample()
    await settle()
    assert json.loads(early.texts[-1])["streams"][0]["state"] == "unsynchronized"


async def test_states_offered_while_a_page_starts_follow_its_full_one() -> None:
    page = Page()
    page.subscriber.offer(5, json.dumps({"version": 5}))
    await settle()
    assert page.texts == []
    page.subscriber.offer_full(4, json.dumps({"version": 4}))
    await settle()
    page.acknowledge()
    await settle()
    assert page.versions == [4, 5]


async def test_state_that_a_full_one_contains_already_is_not_sent_again() -> None:
    page = Page()
    page.subscriber.offer(5, json.dumps({"version": 5}))
    page.subscriber.offer_full(5, json.dumps({"version": 5}))
    await settle()
    page.acknowledge()
    await settle()
    assert page.versions == [5]


async def test_acknowledging_something_else_changes_nothing(live: Live, source: FakeSource) -> None:
    page = await opened(live)
    source.now_statuses = (lost(),)
    live.sample()
    await settle()
    source.now_statuses = (status(),)
    live.sample()
    for nonsense in (None, -1, "2", 10**9):
        page.subscriber.acknowledge(nonsense)
    await settle()
    assert len(page.texts) == 2


async def test_page_that_cannot_be_sent_to_is_left_alone(live: Live, source: FakeSource) -> None:
    tries = []

    async def fail(text: str) -> None:
        tries.append(text)
        raise ConnectionError("gone")

    subscriber = Subscriber(fail)
    live.subscribe(subscriber)
    subscriber.offer_full(*live.full())
    await settle()
    for _ in range(3):
        source.now_statuses = (lost(), *source.now_statuses)
        live.sample()
        await settle()
    assert len(tries) == 1


async def test_unsubscribed_page_gets_nothing(live: Live, source: FakeSource) -> None:
    page = await opened(live)
    live.unsubscribe(page.subscriber)
    source.now_statuses = (lost(),)
    live.sample()
    await settle()
    assert len(page.texts) == 1


def test_nobody_watching_costs_no_state(live: Live, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "build", lambda picture: pytest.fail("built a state for nobody"))
    for _ in range(3):
        live.sample()
        clock.now += 1


async def test_sections_are_there_only_where_their_part_runs(live: Live, source: FakeSource) -> None:
    assert "instances" not in json.loads(live.full()[1])
    source.now_extras = {"instances": [{"name": "a"}]}
    assert json.loads(live.full()[1])["instances"] == [{"name": "a"}]


def test_sampler_outlives_a_mistake(source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    from tests.support.waiting import wait_until

    live = Live(source, "here", period=0.005)
    source.statuses = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    live.start()
    wait_until(lambda: "sample of the live state failed" in caplog.text)
    del source.statuses  # type: ignore[method-assign]
    wait_until(lambda: live.stream_series(status().spec.id) is not None)
    assert live.running
    live.stop()
    assert not live.running
