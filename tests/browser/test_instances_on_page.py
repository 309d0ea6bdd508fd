from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.conftest import Stopwatch, Tabs
from tests.browser.portal import ADMIN, VIEWER, Portal, beat, register
from tests.support.processes import EtcdServer

SOON_MS = 20_000


def test_instances_and_decisions_appear_as_they_happen(
    make_portal: Callable[..., Portal], tabs: Tabs, stopwatch: Stopwatch
) -> None:
    portal = make_portal([], discovery={"enabled": True}, flags=["--load-balance-policy", "CAR"])
    page = tabs.open(portal.base, user=ADMIN)
    instances, decisions = page.locator("#ops-instances"), page.locator("#ops-decisions")
    expect(instances).to_contain_text("No instance is registered", timeout=SOON_MS)
    # Its ports would lie beyond 65535, so it cannot be followed.
    row = instances.locator('[data-key="127.0.0.1:60000"]')
    with stopwatch("an excluded instance is shown with its reason"):
        register(portal, "127.0.0.1:60000")
        expect(row).to_contain_text("Not followed:", timeout=SOON_MS)
    expect(row).to_contain_text("port_overflow")
    expect(row).to_contain_text("not reported")
    expect(row).to_contain_text("none of 1")
    beat(portal, "127.0.0.1:60000")
    expect(row).to_contain_text("3 waiting, cache 25.0 %", timeout=SOON_MS)
    decision = portal.call("POST", "routing/select", {"token_ids": list(range(500))})["decision_id"]
    made = decisions.locator(f'[data-key="{decision}"]')
    expect(made).to_contain_text("127.0.0.1:60000", timeout=SOON_MS)
    expect(made).to_contain_text("0.500 + 0.500")
    # Paused, the list stands still.
    page.get_by_role("button", name="Pause").click()
    later = portal.call("POST", "routing/select", {"token_ids": [1]})["decision_id"]
    expect(page.locator('[data-card="decisions"] .ops-card-value')).not_to_have_text("0", timeout=SOON_MS)
    expect(decisions.locator(f'[data-key="{later}"]')).to_have_count(0)
    page.get_by_role("button", name="Go on").click()
    expect(decisions.locator(f'[data-key="{later}"]')).to_be_visible(timeout=SOON_MS)
    # A click explains.
    made.get_by_role("link").click()
    expect(page.locator("#content")).to_contain_text("127.0.0.1:60000", timeout=SOON_MS)
    expect(page.locator("#content")).to_contain_text("hit ratio")
    page.go_back()
    # Of a decode instance no prefix can be reused; with another role that is over.
    register(portal, "127.0.0.1:20000", type=2)
    other = instances.locator('[data-key="127.0.0.1:20000"]')
    expect(other).to_contain_text("Not followed: it has the decode role", timeout=SOON_MS)
    with stopwatch("an instance is followed that was excluded"):
        register(portal, "127.0.0.1:20000")
        expect(other).not_to_contain_text("Not followed", timeout=SOON_MS)
    expect(other).to_contain_text("1 of 1")
    # Its stream's page tells when that is over, and what was known stays.
    page.get_by_role("link", name="127.0.0.1:20000/dp0").click()
    absent, charts = page.locator("#ops-absent"), page.locator("#ops-charts")
    expect(page.locator("#ops-resync")).to_be_enabled(timeout=SOON_MS)
    expect(absent).to_be_hidden()
    register(portal, "127.0.0.1:20000", type=2)
    expect(absent).to_contain_text("The portal does not follow this stream any more", timeout=SOON_MS)
    expect(page.locator("#ops-state")).to_have_text("no longer followed")
    expect(page.locator("#ops-resync")).to_be_hidden()
    page.reload()
    expect(absent).to_contain_text("Last followed on", timeout=SOON_MS)
    expect(charts).to_be_hidden()
    register(portal, "127.0.0.1:20000")
    expect(absent).to_be_hidden(timeout=SOON_MS)
    expect(charts).to_be_visible()


def test_etcd_that_is_away_is_a_banner_until_it_is_back(
    make_portal: Callable[..., Portal], etcd_server: EtcdServer, tabs: Tabs, stopwatch: Stopwatch
) -> None:
    flags = ["--instance-source", "etcd", "--etcd-addr", etcd_server.endpoint]
    portal = make_portal([], discovery={"enabled": True}, flags=flags)
    page = tabs.open(portal.base, user=VIEWER)
    banner = page.locator('[data-code="etcd_away"]')
    expect(page.locator("#ops-instances")).to_be_visible(timeout=SOON_MS)
    expect(banner).to_have_count(0, timeout=SOON_MS)
    with stopwatch("etcd away is a banner"):
        etcd_server.kill()
        expect(banner).to_contain_text("etcd is away", timeout=SOON_MS)
    expect(banner).to_contain_text(etcd_server.endpoint)
    etcd_server.start()
    with stopwatch("the banner goes once etcd answers"):
        expect(banner).to_have_count(0, timeout=SOON_MS)
