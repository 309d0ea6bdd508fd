"""Every page on a phone and a laptop, light and dark: nothing overflows, axe finds nothing serious."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Tabs
from tests.browser.portal import ADMIN, BARE, LEFT, VIEWER

AXE = (Path(__file__).parent / "vendor" / "axe-4.14.1.min.js").read_text()
WIDTHS = (1440, 390)
SCHEMES = ("light", "dark")
LOOKED_AT = {("light", 1440), ("dark", 390)}
"""Where axe looks: every width and every scheme once."""

Visit = Callable[..., Page]


def ready_operations(page: Page) -> None:
    expect(page.locator("#ops-table [data-stream]").first).to_be_visible()
    expect(page.locator('[data-card="events"] canvas')).to_be_visible()


def ready_dialog(page: Page) -> None:
    ready_operations(page)
    page.locator("#ops-table").get_by_role("button", name="Force resync").first.click()
    page.get_by_label("Drop what the index holds first").check()


def ready_stream(page: Page) -> None:
    expect(page.locator("#ops-chart-blocks canvas")).to_be_visible()


def ready_explorer(page: Page) -> None:
    page.locator("textarea").fill(" ".join(map(str, range(200))))
    page.get_by_role("button", name="Look up").click()
    expect(page.locator(".explorer-streams")).to_be_visible()
    page.locator("summary").first.click()


def ready_refusal(page: Page) -> None:
    page.locator("textarea").fill("hello")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator(".kv-banner-warning")).to_be_visible()


def ready_at_once(page: Page) -> None:
    expect(page.locator("h1, #id_username").first).to_be_visible()


def ready_lab(page: Page) -> None:
    expect(page.locator(".ops-verdict-title")).to_be_visible()
    expect(page.locator(".lab-spark")).to_be_visible()


def ready_decision(page: Page) -> None:
    page.locator("#ops-decisions a").first.click()
    expect(page.locator(".kv-explanation")).to_be_visible()


def ready_absent(page: Page) -> None:
    expect(page.locator("#ops-absent")).to_be_visible()
    expect(page.locator("#ops-connection")).to_have_text("live")


STREAM = "/admin/streams/stream/find/?instance=10.0.0.1:8000&rank=0"
PAGES: dict[str, tuple[str, str, Callable[[Page], None]]] = {
    "operations": ("/admin/", ADMIN, ready_operations),
    "operations-viewer": ("/admin/", VIEWER, ready_operations),
    "operations-dialog": ("/admin/", ADMIN, ready_dialog),
    "operations-bare": ("/admin/", BARE, ready_at_once),
    "stream": (STREAM, ADMIN, ready_stream),
    "stream-left": (f"/admin/streams/stream/find/?instance={LEFT}&rank=0", ADMIN, ready_absent),
    "explorer": ("/admin/streams/stream/explorer/", ADMIN, ready_explorer),
    "explorer-refusal": ("/admin/streams/stream/explorer/", ADMIN, ready_refusal),
    "lab": ("/admin/routing/decision/lab/?lambda=0.75", ADMIN, ready_lab),
    "lab-refusal": ("/admin/routing/decision/lab/?lambda=x", VIEWER, ready_lab),
    "decisions": ("/admin/routing/decision/", ADMIN, ready_at_once),
    "decision": ("/admin/", ADMIN, ready_decision),
    "instances": ("/admin/routing/instance/", ADMIN, ready_at_once),
    "instance-form": ("/admin/routing/instance/add/", ADMIN, ready_at_once),
    "streams": ("/admin/streams/stream/", ADMIN, ready_at_once),
    "streams-left": ("/admin/streams/stream/?state=not_followed", ADMIN, ready_at_once),
    "confirmation": ("/admin/streams/stream/1/resync/", ADMIN, ready_at_once),
    "history": ("/admin/streams/streamstatechange/", ADMIN, ready_at_once),
    "history-row": ("/admin/streams/streamstatechange/1/change/", ADMIN, ready_at_once),
    "audit": ("/admin/streams/resyncrequest/", ADMIN, ready_at_once),
    "replicas": ("/admin/kvportal/replica/", ADMIN, ready_at_once),
    "replica": ("/admin/kvportal/replica/1/change/", ADMIN, ready_at_once),
    "not-found": ("/admin/nothing/", ADMIN, ready_at_once),
    "login": ("/admin/login/", "", ready_at_once),
}


def violations(page: Page) -> list[str]:
    """What axe calls serious or critical, with the elements concerned."""
    page.evaluate(AXE)
    found: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


CUT = """() => [...document.querySelectorAll("table")].filter((table) => {
  const box = table.getBoundingClientRect();
  for (let around = table.parentElement; around !== document.body; around = around.parentElement) {
    const clip = around.getBoundingClientRect();
    if (getComputedStyle(around).overflowX !== "visible" && box.right - clip.right > 1) return true;
  }
  return false;
}).map((table) => `table ${table.id || table.className} is cut`)"""


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_and_is_accessible(visit: Visit, site: Site, tabs: Tabs, name: str) -> None:
    tabs.forgiven += ["404"] if name == "not-found" else []
    path, user, make_ready = PAGES[name]
    page = visit(path, user=user or None, viewport={"width": WIDTHS[0], "height": 900})
    if name != "login":
        page.wait_for_url(f"{site.base}/admin/**")
    problems = []
    make_ready(page)
    # Colours half-way between two themes are nobody's.
    page.add_style_tag(content="* { transition: none !important; }")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            needed = page.evaluate("document.documentElement.scrollWidth")
            if needed > width:
                problems.append(f"{scheme}, {width} px: needs {needed} px")
            problems += [f"{scheme}, {width} px: {text}" for text in page.evaluate(CUT)]
            if (scheme, width) in LOOKED_AT:
                problems += [f"{scheme}, {width} px: {text}" for text in violations(page)]
    assert problems == [], "\n".join(problems)


def test_table_that_has_to_scroll_says_so(visit: Visit) -> None:
    page = visit("/admin/routing/decision/", user=ADMIN, viewport={"width": 800, "height": 900})
    hint = page.get_by_text("Scroll sideways for more columns")
    table = page.get_by_role("region", name="Decisions, table that scrolls sideways")
    expect(hint).to_be_visible()
    expect(table).to_have_attribute("data-more", "right")
    table.focus()
    page.keyboard.press("ArrowRight")
    expect(table).to_have_attribute("data-more", "left right")
    table.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    expect(table).to_have_attribute("data-more", "left")
    assert violations(page) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(hint).to_be_hidden()
    expect(table).to_have_count(0)
