from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

from playwright.sync_api import expect

from tests.browser.conftest import Tabs
from tests.browser.portal import ADMIN, VIEWER, Portal
from tests.support.processes import EtcdServer

SOON_MS = 20_000


def call(portal: Portal, method: str, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = Request(f"{portal.base}/v1/internal/{path}", json.dumps(body).encode(), headers, method=method)
    with urlopen(request) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def register(portal: Portal, name: str, **changes: Any) -> None:
    registration = {"name": name, "incarnation_id": "life-1", "type": 0, "dp_size": 1, "ttl_s": 600}
    call(portal, "PUT", f"instances/{name}", {**registration, **changes})


def beat(portal: Portal, name: str) -> None:
    load = {"waiting_requests_num": 3, "gpu_cache_usage_perc": 0.25}
    body = {"name": name, "incarnation_id": "life-1", "load_metrics": load}
    call(portal, "POST", "instances/heartbeat", body)


def test_instances_and_decisions_appear_as_they_happen(
    make_portal: Callable[..., Portal], tabs: Tabs
) -> None:
    portal = make_portal([], discovery={"enabled": True}, flags=["--load-balance-policy", "CAR"])
    page = tabs.open(portal.base, user=ADMIN)
    instances, decisions = page.locator("#ops-instances"), page.locator("#ops-decisions")
    expect(instances).to_contain_text("No instance is registered", timeout=SOON_MS)
    # Its ports would lie beyond 65535, so it cannot be followed.
    register(portal, "127.0.0.1:60000")
    row = instances.locator('[data-key="127.0.0.1:60000"]')
    expect(row).to_contain_text("Not followed:", timeout=SOON_MS)
    expect(row).to_contain_text("port_overflow")
    expect(row).to_contain_text("not reported")
    expect(row).to_contain_text("none of 1")
    beat(portal, "127.0.0.1:60000")
    expect(row).to_contain_text("3 waiting, cache 25.0 %", timeout=SOON_MS)
    decision = call(portal, "POST", "routing/select", {"token_ids": list(range(500))})["decision_id"]
    made = decisions.locator(f'[data-key="{decision}"]')
    expect(made).to_contain_text("127.0.0.1:60000", timeout=SOON_MS)
    expect(made).to_contain_text("0.500 + 0.500")
    # Paused, the list stands still.
    page.get_by_role("button", name="Pause").click()
    later = call(portal, "POST", "routing/select", {"token_ids": [1]})["decision_id"]
    expect(page.locator('[data-card="decisions"] .ops-card-value')).not_to_have_text("0", timeout=SOON_MS)
    expect(decisions.locator(f'[data-key="{later}"]')).to_have_count(0)
    page.get_by_role("button", name="Go on").click()
    expect(decisions.locator(f'[data-key="{later}"]')).to_be_visible(timeout=SOON_MS)
    # A click explains.
    made.get_by_role("link").click()
    expect(page.locator("#content")).to_contain_text("127.0.0.1:60000", timeout=SOON_MS)
    expect(page.locator("#content")).to_contain_text("hit ratio")


def test_etcd_that_is_away_is_a_banner_until_it_is_back(
    make_portal: Callable[..., Portal], etcd_server: EtcdServer, tabs: Tabs
) -> None:
    flags = ["--instance-source", "etcd", "--etcd-addr", etcd_server.endpoint]
    portal = make_portal([], discovery={"enabled": True}, flags=flags)
    page = tabs.open(portal.base, user=VIEWER)
    banner = page.locator('[data-code="etcd_away"]')
    expect(page.locator("#ops-instances")).to_be_visible(timeout=SOON_MS)
    expect(banner).to_have_count(0, timeout=SOON_MS)
    etcd_server.kill()
    expect(banner).to_contain_text("etcd is away", timeout=SOON_MS)
    expect(banner).to_contain_text(etcd_server.endpoint)
    etcd_server.start()
    expect(banner).to_have_count(0, timeout=SOON_MS)
