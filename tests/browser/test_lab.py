"""The routing lab against the real thing: a second portal that runs with the weights that are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from playwright.sync_api import expect

from streams.simulator.server import EngineServer
from tests.browser.conftest import Tabs
from tests.browser.portal import VIEWER, Portal, beat, register
from tests.support.waiting import wait_until

TOPIC = "xllm-kv"
WEIGHTS = ("--car-prefill-lambda=1", "--car-host-hit-weight=0.25")


@pytest.fixture
def engines() -> Iterator[list[EngineServer]]:
    """Two engines that stand still: one holds the popular prompts, the other nothing."""
    opened = [EngineServer.open(seed=seed, topic=TOPIC, host_blocks=128) for seed in (1, 2)]
    for engine in opened:
        engine.engine.step(40)
    for rank in opened[1].engine.ranks:
        rank.clear()
    yield opened
    for engine in opened:
        engine.close()


def name(engine: EngineServer) -> str:
    return f"127.0.0.1:{engine.port}"


def test_lab_shows_what_a_portal_with_those_weights_answers(
    make_portal: Callable[..., Portal], engines: list[EngineServer], tabs: Tabs
) -> None:
    discovery = {"enabled": True, "topic": TOPIC, "block_size": 16}
    flags = ["--load-balance-policy=CAR"]
    everything = {"KVPORTAL_DECISION_EXPLAIN_SHARE": "1"}
    queue_minded = make_portal(
        [], discovery=discovery, flags=[*flags, "--car-prefill-lambda=0.1"], variables=everything
    )
    cache_minded = make_portal([], discovery=discovery, flags=[*flags, *WEIGHTS])
    body = {"token_ids": engines[0].engine.ranks[0].popular_prompts()[0]}
    for portal in (queue_minded, cache_minded):
        for engine, waiting in zip(engines, (8, 1), strict=True):
            register(portal, name(engine))
            beat(portal, name(engine), waiting)
        wait_until(partial(held, portal, body), 20, "the streams do not synchronize")
    decided = queue_minded.call("POST", "routing/select", body)
    answer = cache_minded.call("POST", "routing/select", body)
    page = tabs.open(
        queue_minded.base, "/admin/routing/decision/lab/?lambda=1&host_weight=0.25&newest=50", user=VIEWER
    )
    assert decided["prefill"]["instance_name"] == name(engines[1])
    assert answer["prefill"]["instance_name"] == name(engines[0])
    row = page.locator(f'[data-decision="{decided["decision_id"]}"]')
    cells = row.locator("td")
    expect(cells.nth(0)).to_contain_text(decided["prefill"]["instance_name"])
    expect(cells.nth(1)).to_contain_text(answer["prefill"]["instance_name"])
    expect(cells.nth(3)).to_contain_text(f"→ {answer['predicted_hit_tokens']}")
    expect(cells.nth(5)).to_contain_text(f"{answer['prefill']['score']:.4f}")
    expect(cells.nth(5)).to_contain_text(f"hit ratio {answer['prefill']['kv_hit_ratio']:.3f}")
    # Its explanation is a click away, and the row of another lambda leads to that lambda.
    page.locator("#lab-sweep-title").locator("xpath=../..").get_by_role("link", name="0.1").click()
    expect(page.locator("[name=lambda]")).to_have_value("0.1")
    expect(page.locator(f'[data-decision="{decided["decision_id"]}"]')).to_have_count(0)


def held(portal: Portal, body: object) -> int:
    """Tokens of the prompt that any synchronized stream holds, once both engines are followed."""
    matches = portal.call("POST", "kv-cache/query", body)["matches"]
    ready = len(matches) == 2 and all(match["synchronized"] for match in matches)
    return max(match["device_hit_tokens"] for match in matches) if ready else 0
