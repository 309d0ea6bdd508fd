"""The Operations page with much on it: 128 streams in every kind of trouble, names as clusters make them.

The state is the server's own (`opsstate.build`), handed to the page in place of the live one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playwright.sync_api import Page, WebSocketRoute, expect

from kvportal.gauges import instances_json
from kvportal.opsstate import Banner, Picture, build
from kvportal.records import ReplicaView
from kvportal.trends import Totals, Trends
from routing.instances.model import HealthState
from streams.status import Fault, StreamState, StreamStatus
from tests.admin.values import GAP, NOW, lost, spec, status
from tests.browser.conftest import LONG_NAME
from tests.browser.portal import ADMIN
from tests.browser.test_layout import SCHEMES, WIDTHS, violations
from tests.routing.builders import instance

LONG_SENTENCE = (
    "the snapshot of 134,217,728 bytes is larger than max_message_bytes (67,108,864), and "
    "unbreakable_" + "x" * 120 + " stands in it"
)


def statuses() -> tuple[StreamStatus, ...]:
    named = replace(spec(1), instance_name=LONG_NAME)
    return (
        lost(1, since=NOW - 90_000, error=Fault("snapshot_too_large", LONG_SENTENCE), spec=named),
        status(2, lag_seconds=-12.5),
        status(3, warning=Fault("calibration_failed", LONG_SENTENCE)),
        status(4, state=StreamState.SYNCING, error=Fault("syncing", "the first snapshot is on its way")),
        *(lost(number, since=NOW - number) for number in range(5, 15)),
        *(status(number, device_blocks=10**7, sequence=10**12) for number in range(15, 129)),
    )


def all_lost() -> tuple[StreamStatus, ...]:
    """Every stream for one cause, which each puts into words of its own."""
    return tuple(
        lost(number, since=NOW - number, error=Fault("connect_failed", f"nothing listens on port {number}"))
        for number in range(1, 129)
    )


def crowded_state(now_statuses: tuple[StreamStatus, ...]) -> dict[str, Any]:
    trends = Trends()
    for second in range(-20, 1):
        trends.observe(NOW + second, now_statuses, Totals(queries=7 * second, decisions=200 * second))
    elsewhere = ReplicaView("a-replica-with-a-name.of-its-own:8888", NOW - 500, NOW - 100, {"streams": {}})
    views = [
        instance(LONG_NAME, "MIX", current="DECODE", dp_size=8, state=HealthState.SUSPECT),
        *(instance(f"10.0.0.{number}:8000", waiting=number) for number in range(2, 51)),
    ]
    excluded = {LONG_NAME: Fault("port_conflict", "10.0.0.9:28000 is its event port and " + LONG_NAME * 2)}
    picture = Picture(
        now=NOW,
        replica="here",
        statuses=now_statuses,
        trends=trends,
        banners=[
            Banner("etcd_away", "error", "etcd is away", f"etcd-1:2379 does not answer ({LONG_SENTENCE}).")
        ],
        views=[elsewhere, ReplicaView("here", NOW - 500, NOW, {"streams": {}})],
        gone=frozenset(),
        extras={"instances": instances_json(views, excluded, now_statuses, NOW), "decisions": []},
    )
    return {"type": "state", "version": 1, "now": NOW, "series": trends.series(), **build(picture)}


def show(visit: Callable[..., Page], state: dict[str, Any]) -> Page:
    """The Operations page with that state and no other."""
    page = visit("/admin/streams/stream/explorer/", user=ADMIN)
    text = json.dumps(state)

    def feed(socket: WebSocketRoute) -> None:
        socket.on_message(lambda _: None)
        socket.send(text)

    page.route_web_socket("**/ws/ops/", feed)
    page.get_by_role("link", name="Operations", exact=True).click()
    return page


def test_one_cause_reads_as_one_however_many_it_concerns(visit: Callable[..., Page]) -> None:
    state = crowded_state(all_lost())
    state["instances"] = []
    page = show(visit, state)
    expect(page.locator(".ops-verdict-title")).to_have_text("128 of 128 streams are not synchronized")
    lines = page.locator("#ops-verdict li")
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("All 128 streams, the first out of sync for 2 min")
    expect(lines).to_contain_text(
        "10.0.0.128:8000/dp0, 10.0.0.127:8000/dp0, 10.0.0.126:8000/dp0 and 125 more"
    )
    expect(lines).to_contain_text("For example 10.0.0.128:8000/dp0: nothing listens on port 128")
    expect(lines).to_contain_text("Check that the engine runs")


def test_crowded_page_fits_and_stays_readable(visit: Callable[..., Page]) -> None:
    page = show(visit, crowded_state(statuses()))
    expect(page.locator("#ops-table [data-stream]")).to_have_count(128)
    expect(page.locator(".ops-verdict-title")).to_have_text("11 of 128 streams are not synchronized")
    # One line for each cause, however many streams it concerns.
    lines = page.locator("#ops-verdict li")
    expect(lines).to_have_count(5)
    expect(lines.nth(0)).to_contain_text(LONG_NAME)
    expect(lines.nth(1)).to_contain_text("10 streams, the first out of sync for 14 s")
    expect(lines.nth(1)).to_contain_text(
        "10.0.0.14:8000/dp0, 10.0.0.13:8000/dp0, 10.0.0.12:8000/dp0 and 7 more" + GAP.sentence
    )
    expect(lines.nth(2)).to_contain_text(f"{LONG_NAME}/dp0 out of sync for 1 d 1 h")
    expect(lines.nth(3)).to_contain_text("10.0.0.4:8000/dp0")
    expect(lines.nth(4)).to_contain_text("warning")
    expect(page.locator(".ops-verdict-more")).to_have_count(0)
    first = page.locator("#ops-table [data-stream]").first
    expect(first).to_have_attribute("data-stream", f"{LONG_NAME}/dp0")
    expect(first).to_contain_text(LONG_SENTENCE)
    skewed = page.locator('#ops-table [data-stream="10.0.0.2:8000/dp0"]')
    expect(skewed).to_contain_text("−12.5 s")
    expect(skewed).to_contain_text("the engine's clock is ahead")
    expect(page.locator("#ops-instances")).to_contain_text("(port_conflict)")
    page.add_style_tag(content="* { transition: none !important; }")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (scheme, width)
    assert violations(page) == []
