from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Stopwatch, Tabs, instance_name, specs_of
from tests.browser.portal import ADMIN, BARE, OPERATOR, VIEWER, Portal
from tests.browser.test_layout import violations
from tests.support.waiting import wait_until

Visit = Callable[..., Page]

DOWN_SECONDS = 2.0
SOON_MS = 15_000
"""Generous: what is shown within two seconds on a quiet machine may take longer on a busy one."""


def row(page: Page, name: str):  # type: ignore[no-untyped-def]
    return page.locator(f'#ops-table [data-stream="{name}"]')


def wait_for_streams(page: Page) -> None:
    expect(page.locator("#ops-verdict")).to_have_attribute("data-tone", "good", timeout=SOON_MS)


@contextmanager
def silent_snapshots(site: Site, engine: int) -> Iterator[None]:
    site.engines[engine].spoil_snapshots("silent")
    try:
        yield
    finally:
        site.engines[engine].spoil_snapshots(None)


# ---- what one sees


def test_page_shows_every_stream_with_numbers_that_move(visit: Visit, site: Site) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    expect(page.locator(".ops-verdict-title")).to_have_text("All 4 streams are synchronized")
    assert page.locator("#ops-table [data-stream]").count() == 4
    one = row(page, site.name(0, 1))
    expect(one).to_contain_text("synchronized")
    expect(one).to_contain_text(site.engines[0].endpoint(1))
    sequence = one.locator('[data-column="sequence"] > span:last-child')
    before = sequence.inner_text()
    expect(sequence).not_to_have_text(before, timeout=SOON_MS)
    expect(page.locator('[data-card="synchronized"] .ops-card-value')).to_have_text("4 of 4")
    expect(page.locator('[data-card="events"] canvas')).to_be_visible(timeout=SOON_MS)
    expect(page.locator("#ops-replicas")).to_contain_text("this page comes from it", timeout=SOON_MS)


def test_lost_stream_is_shown_with_reason_and_advice_and_recovers(
    visit: Visit, site: Site, stopwatch: Stopwatch
) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    name, lost = site.name(1), row(page, site.name(1))
    with silent_snapshots(site, 1):
        with stopwatch("a gap is shown"):
            site.engines[1].skip_sequence(3)
            expect(lost).to_have_attribute("data-tone", "bad", timeout=SOON_MS)
        verdict = page.locator("#ops-verdict")
        expect(verdict).to_contain_text("1 of 4 streams is not synchronized")
        expect(verdict).to_contain_text(name)
        expect(verdict).to_contain_text("out of sync for")
        with stopwatch("a silent snapshot endpoint is named, after its timeout of 2 s"):
            expect(lost).to_contain_text("snapshot_timeout", timeout=SOON_MS)
        expect(lost).to_contain_text("What to do:")
        expect(lost).to_contain_text(site.engines[1].replay_endpoint())
        # Worst first.
        expect(page.locator("#ops-table [data-stream]").first).to_have_attribute("data-stream", name)
    with stopwatch("a stream is well again once its snapshots are answered"):
        expect(lost).not_to_have_attribute("data-tone", "bad", timeout=SOON_MS)
    wait_for_streams(page)


def test_disconnected_engine_is_shown_and_recovers(visit: Visit, site: Site, stopwatch: Stopwatch) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    lost = row(page, site.name(2))
    with stopwatch("a disconnect is shown"):
        site.engines[2].drop_connection(down_s=DOWN_SECONDS, wait=False)
        expect(lost).to_have_attribute("data-tone", "bad", timeout=SOON_MS)
    with stopwatch(f"an engine that is away for {DOWN_SECONDS:g} s is well again"):
        expect(lost).to_contain_text("What to do: Check that the engine runs")
        wait_for_streams(page)


def test_search_filter_and_sort_narrow_the_table(visit: Visit, site: Site) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    rows = page.locator("#ops-table [data-stream]")
    page.get_by_label("Search").fill("10.0.0.1")
    expect(rows).to_have_count(2)
    page.get_by_label("Search").fill("nothing like this")
    expect(page.locator("#ops-table .ops-empty")).to_contain_text("None of the 4 streams matches")
    page.get_by_label("Search").fill("")
    page.get_by_label("Show").select_option("unsynchronized")
    expect(rows).to_have_count(0)
    page.get_by_label("Show").select_option("synchronized")
    expect(rows).to_have_count(4)
    names = [site.name(0), site.name(0, 1), site.name(1), site.name(2)]
    heading = page.get_by_role("columnheader", name="Stream", exact=True)
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "ascending")
    assert [one.get_attribute("data-stream") for one in rows.all()] == names
    heading.get_by_role("button").press("Enter")
    expect(heading).to_have_attribute("aria-sort", "descending")
    assert [one.get_attribute("data-stream") for one in rows.all()] == names[::-1]


def test_stream_page_shows_facts_charts_and_history(visit: Visit, site: Site) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    page.get_by_role("link", name=site.name(0, 1)).click()
    expect(page.locator("h1")).to_have_text(site.name(0, 1))
    expect(page.locator("#ops-state")).to_have_text("synchronized", timeout=SOON_MS)
    expect(page.locator("#ops-facts")).to_contain_text(site.engines[0].replay_endpoint(1))
    for chart in ("blocks", "events", "lag"):
        expect(page.locator(f"#ops-chart-{chart} canvas")).to_be_visible(timeout=SOON_MS)
    expect(page.locator(".ops-log")).to_contain_text("snapshot at watermark")
    expect(page.locator("#ops-resync")).to_have_count(0)


def test_stream_page_adds_what_happens_to_its_history(visit: Visit, site: Site) -> None:
    page = visit(f"/admin/streams/stream/find/?instance={instance_name(1)}&rank=0", user=VIEWER)
    expect(page.locator("#ops-state")).to_have_text("synchronized", timeout=SOON_MS)
    lost = page.locator(".ops-log tr", has=page.locator(".kv-badge-bad"), has_text="sequence_gap")
    before = lost.count()
    counted = page.locator(
        "#ops-counters div", has=page.locator("dt", has_text=re.compile("^gaps$"))
    ).locator("dd")
    gaps_counted = int(counted.inner_text())
    site.engines[1].skip_sequence(3)
    expect(lost).to_have_count(before + 1, timeout=SOON_MS)
    newest = page.locator(".ops-log tbody tr").first
    expect(newest).to_contain_text("synchronized", timeout=SOON_MS)
    expect(newest).to_contain_text("snapshot at watermark")
    expect(counted).to_have_text(str(gaps_counted + 1), timeout=SOON_MS)
    shown = page.locator(".ops-log tbody tr").evaluate_all(
        "rows => rows.map(row => Number(row.dataset.change))"
    )
    assert shown == sorted(set(shown), reverse=True), "each once, newest first"


WRITTEN = """
window.written = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const width = this.measureText(text).width;
  if (/^\\d\\d:\\d\\d/.test(text)) window.written.push([text, x - width / 2, x + width / 2]);
  return write.apply(this, arguments);
};
"""


@pytest.mark.parametrize("width", [1440, 390])
def test_times_below_the_charts_do_not_crowd_in_the_first_minute(
    visit: Visit, site: Site, width: int
) -> None:
    page = visit("/admin/", user=VIEWER, viewport={"width": width, "height": 900})
    page.add_init_script(WRITTEN)
    now = int(time.time())
    points = {
        "at": [now - 10, now - 5, now],
        **{name: [1, 2, 3] for name in ("device", "host", "events", "lag")},
    }
    page.route("**/series/", lambda route: route.fulfill(json={"series": points}))
    page.goto(f"{site.base}/admin/streams/stream/find/?instance={instance_name(0)}&rank=0")
    expect(page.locator("#ops-chart-lag canvas")).to_be_visible(timeout=SOON_MS)
    wait_until(lambda: page.evaluate("written.length"), 15, "no time is written below a chart")
    drawings: list[list[list[Any]]] = []
    for label in page.evaluate("written"):
        # A drawing goes from left to right.
        if not drawings or label[1] <= drawings[-1][-1][1]:
            drawings.append([])
        drawings[-1].append(label)
    assert max(len(drawing) for drawing in drawings) > 1
    for drawing in drawings:
        for left, right in pairwise(drawing):
            assert right[1] - left[2] >= 8, f"{left[0]} and {right[0]} touch"


# ---- resync


def test_resync_of_a_row_asks_is_done_and_is_audited(visit: Visit, site: Site) -> None:
    page = visit(user=OPERATOR)
    wait_for_streams(page)
    name = site.name(0, 1)
    button = row(page, name).get_by_role("button", name="Force resync")
    button.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(name)
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".ops-toast")).to_have_count(0)
    button.click()
    dialog.get_by_role("button", name="Force resync").click()
    expect(page.locator(".ops-toast")).to_contain_text("Resync done: 1 of 1 stream has", timeout=SOON_MS)
    page.get_by_role("link", name="Resyncs").click()
    newest = page.locator("#result_list tbody tr").first
    expect(newest).to_contain_text(name)
    expect(newest).to_contain_text(OPERATOR)
    expect(newest).to_contain_text("Operations page")
    # The outcome follows within moments.
    wait_until(lambda: page.reload() and "Done" in newest.inner_text(), interval=0.2)


def test_resync_of_a_selection_with_drop_says_so_before_it_happens(visit: Visit, site: Site) -> None:
    page = visit(user=OPERATOR)
    wait_for_streams(page)
    selection = page.locator("#ops-resync-selected")
    expect(selection).to_be_disabled()
    for name in (site.name(1), site.name(2)):
        page.get_by_label(f"Select {name}").check()
    expect(selection).to_have_text("Force resync of 2 streams")
    selection.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Drop what the index holds first").check()
    dialog.get_by_role("button", name="Drop and resync").click()
    expect(page.locator(".ops-toast")).to_contain_text("Resync done: 2 of 2 streams", timeout=SOON_MS)
    page.goto(f"{site.base}/admin/streams/resyncrequest/")
    newest = page.locator("#result_list tbody tr").first
    expect(newest).to_contain_text(site.name(2))
    expect(newest.locator(".field-dropped")).to_have_text("yes")
    wait_for_streams(visit(user=VIEWER))


def test_resync_that_cannot_succeed_is_reported(visit: Visit, site: Site) -> None:
    page = visit(user=OPERATOR)
    wait_for_streams(page)
    # The page gives up after 25 s by its own clock, which this test moves on.
    page.evaluate(
        "() => { const real = performance.now.bind(performance); window.ahead = 0;"
        " performance.now = () => real() + window.ahead; }"
    )
    with silent_snapshots(site, 1):
        row(page, site.name(1)).get_by_role("button", name="Force resync").click()
        page.get_by_role("dialog").get_by_role("button", name="Force resync").click()
        expect(page.locator(".ops-toast")).to_contain_text("0 of 1 stream has", timeout=SOON_MS)
        page.evaluate("window.ahead = 60000")
        expect(page.locator(".ops-toast")).to_contain_text("only 0 of 1 stream", timeout=SOON_MS)
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator(".ops-toast")).to_have_count(0)


def test_admin_action_orders_after_a_confirmation(visit: Visit, site: Site) -> None:
    page = visit("/admin/streams/stream/", user=OPERATOR)
    page.locator("#result_list tbody input[type=checkbox]").first.check()
    page.get_by_label("Action:").select_option("force_resync")
    page.get_by_role("button", name="Go").click()
    expect(page.locator("#content")).to_contain_text("Drop what the index holds first")
    page.get_by_role("button", name="Force resync").click()
    expect(page.locator(".messagelist")).to_contain_text(f"Resync ordered for {site.name(0)}")


def test_viewer_is_not_offered_a_resync_and_is_refused_one(visit: Visit, site: Site, tabs: Tabs) -> None:
    page = visit(user=VIEWER)
    wait_for_streams(page)
    assert page.get_by_role("button", name=re.compile("resync")).count() == 0
    assert page.get_by_role("checkbox").count() == 0
    tabs.forgiven.append("403")
    status = page.evaluate(
        """async () => (await fetch(document.getElementById("ops").dataset.resyncUrl, {
             method: "POST", body: '{"targets": null}',
             headers: {"X-CSRFToken": document.querySelector("[name=csrfmiddlewaretoken]").value},
           })).status"""
    )
    assert status == 403


def test_session_that_lost_its_permission_is_told_so_by_the_dialog(
    visit: Visit, site: Site, tabs: Tabs
) -> None:
    page = visit(user=OPERATOR)
    wait_for_streams(page)
    tabs.forgiven.append("403")
    page.route(
        "**/admin/streams/stream/resync/",
        lambda route: route.fulfill(
            status=403,
            content_type="application/json",
            body='{"error": "Your account may not resynchronise streams."}',
        ),
    )
    row(page, site.name(0)).get_by_role("button", name="Force resync").click()
    page.get_by_role("dialog").get_by_role("button", name="Force resync").click()
    expect(page.locator(".ops-toast")).to_contain_text("may not resynchronise")


def test_account_without_permissions_is_told_what_it_lacks(visit: Visit) -> None:
    page = visit(user=BARE)
    expect(page.locator("#content")).to_contain_text("Your account may not view streams")


# ---- keyboard


def test_resync_works_with_the_keyboard_alone(visit: Visit, site: Site) -> None:
    page = visit(user=OPERATOR)
    wait_for_streams(page)
    row(page, site.name(0)).get_by_role("button", name="Force resync").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("button", name="Force resync")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".ops-toast")).to_contain_text("Resync done", timeout=SOON_MS)


# ---- connection


COLOUR_OF = """name => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}"""


@pytest.fixture
def own_portal(site: Site, make_portal: Callable[..., Portal]) -> Portal:
    return make_portal(specs_of(site.engines))


def test_lost_connection_is_shown_and_comes_back_by_itself(own_portal: Portal, tabs: Tabs) -> None:
    tabs.forgiven += ["WebSocket connection", "Failed to load resource"]
    page, signed_out = (tabs.open(own_portal.base, user=ADMIN) for _ in range(2))
    wait_for_streams(page)
    wait_for_streams(signed_out)
    signed_out.context.clear_cookies()
    own_portal.process.kill()
    lost = page.locator("#ops-lost")
    expect(lost).to_contain_text("The connection to the portal is lost", timeout=SOON_MS)
    expect(lost).to_contain_text("last state received")
    expect(page.locator("#ops-connection")).to_have_text("not connected")
    # The headline does not claim any more what was true then.
    stale, verdict = page.locator("#ops-stale"), page.locator("#ops-verdict")
    quiet = page.evaluate(COLOUR_OF, "--kv-off")
    expect(stale).to_contain_text(re.compile(r"Last known, at \d\d:\d\d:\d\d UTC, \d+ s ago:"))
    expect(verdict).to_have_css("border-left-color", quiet)
    expect(page.locator(".ops-verdict-title")).to_have_css("font-weight", "400")
    assert violations(page) == []
    own_portal.start()
    expect(lost).to_be_hidden(timeout=30_000)
    expect(stale).to_be_hidden()
    expect(verdict).to_have_css("border-left-color", page.evaluate(COLOUR_OF, "--kv-good"))
    expect(page.locator("#ops-connection")).to_have_text("live")
    wait_for_streams(page)
    # A session that has ended is told apart from a connection that is lost.
    lost = signed_out.locator("#ops-lost")
    expect(lost).to_contain_text("You are signed out", timeout=30_000)
    expect(lost.get_by_role("link", name="Sign in")).to_be_visible()
    # What happened before the restart is still known.
    page.goto(f"{own_portal.base}/admin/streams/streamstatechange/")
    expect(page.locator("#result_list")).to_contain_text("snapshot at watermark")
    replicas = page.locator("#result_list .field-replica").all_inner_texts()
    assert len(set(replicas)) == 2


# ---- empty states


def test_index_that_is_off_says_what_to_do(make_portal: Callable[..., Portal], tabs: Tabs) -> None:
    page = tabs.open(make_portal(None).base, user=ADMIN)
    expect(page.locator("#ops-banners")).to_contain_text("The index is off", timeout=SOON_MS)
    expect(page.locator("#ops-banners")).to_contain_text("--kv-events-config-file")
    expect(page.locator("#ops-streams")).to_be_hidden()
    expect(page.locator("#ops-instances")).to_contain_text("No instance is registered")
    expect(page.locator("#ops-decisions")).to_contain_text("No routing decision yet")


def test_index_without_streams_says_what_to_do(make_portal: Callable[..., Portal], tabs: Tabs) -> None:
    page = tabs.open(make_portal([], discovery={"enabled": True}).base, user=ADMIN)
    expect(page.locator("#ops-banners")).to_contain_text("There are no streams", timeout=SOON_MS)
    expect(page.locator(".ops-verdict-title")).to_have_text("No stream is followed")
