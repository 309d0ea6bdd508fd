from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

from playwright.sync_api import Page, expect

from tests.browser.conftest import Site
from tests.browser.portal import VIEWER
from tests.support.waiting import wait_until

Visit = Callable[..., Page]


def query(site: Site, prompt: list[int]) -> list[dict[str, Any]]:
    """What the API answers."""
    body = json.dumps({"token_ids": prompt}).encode()
    url = f"{site.base}/v1/internal/kv-cache/query"
    with urlopen(Request(url, body, {"Content-Type": "application/json"})) as answer:
        matches: list[dict[str, Any]] = json.load(answer)["matches"]
        return matches


def look_up(page: Page, text: str) -> None:
    page.locator("textarea").fill(text)
    page.get_by_role("button", name="Look up").click()


def test_explorer_shows_what_the_api_answers(visit: Visit, site: Site) -> None:
    for engine in site.engines:
        engine.set_rate(0)
        engine.flush()
    try:
        prompt = max((p for p in site.engines[1].ranks[0].popular_prompts()), key=len) + [1] * 40
        wait_until(lambda: all(match["synchronized"] for match in query(site, prompt)))
        wait_until(lambda: query(site, prompt) == query(site, prompt))
        matches = query(site, prompt)
        page = visit("/admin/streams/stream/explorer/", user=VIEWER)
        look_up(page, json.dumps({"token_ids": prompt}))
        items = page.locator(".explorer-streams > li")
        expect(items).to_have_count(len(matches))
        for item, match in zip(items.all(), matches, strict=True):
            expect(item).to_contain_text(f"{match['instance_name']}/dp{match['dp_rank']}")
            expect(item).to_contain_text(
                f"Reusable prefix: {match['reusable_prefix_tokens']:,} of {len(prompt):,} tokens"
                f" ({match['device_hit_tokens']:,} device, {match['host_only_hit_tokens']:,} host only"
            )
        assert any(match["reusable_prefix_tokens"] for match in matches)
        expect(page.locator(".explorer-streams")).to_contain_text("longest prefix")
    finally:
        for engine in site.engines:
            engine.set_rate(20)


def test_explorer_takes_128k_tokens(visit: Visit) -> None:
    page = visit("/admin/streams/stream/explorer/", user=VIEWER)
    page.locator("textarea").evaluate(
        "node => { node.value = Array.from({length: 131072}, (_, n) => n % 150000).join(', '); }"
    )
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#explorer-answer h2").first).to_contain_text("131,072 tokens in 4 streams")


def test_explorer_is_kind_to_text_and_to_nothing(visit: Visit) -> None:
    page = visit("/admin/streams/stream/explorer/", user=VIEWER)
    answer = page.locator("#explorer-answer")
    look_up(page, "What is a KV cache?")
    expect(answer).to_contain_text("text has to be tokenized first")
    look_up(page, "")
    expect(answer).to_contain_text("Nothing to look up")
    look_up(page, "1 2 3")
    expect(answer).to_contain_text("shorter than one block")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("textarea")).to_be_focused()


def test_recorded_prompt_of_a_decision_is_looked_up(visit: Visit, site: Site) -> None:
    prompt = list(range(7, 307))
    decision = site.portal.call("POST", "routing/select", {"token_ids": prompt})["decision_id"]
    page = visit(f"/admin/routing/decision/find/?id={decision}", user=VIEWER)
    link = page.get_by_role("link", name="Look up its prompt in the prefix explorer")
    # It is offered once it is in the database.
    wait_until(lambda: link.count() or not page.reload(), interval=0.2)
    link.click()
    expect(page.locator("#explorer-answer h2").first).to_contain_text("300 tokens in 4 streams")
    expect(page.locator("textarea")).to_have_value(", ".join(map(str, prompt)))
