"""The Operations page under load: 128 streams, 50 instances, 200 decisions a second.

A portal of its own, publishers and a gateway in processes of their own, a page in Chromium for the long tasks
(what blocks a browser for more than 50 ms), and pages that only receive and acknowledge, for what one of them
and what ten cost the server. That is measured without events and at ten decisions a second: under the full
load the server's own work wanders by more than ten pages cost, and a state changes every second either way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from playwright.sync_api import Browser, Page, sync_playwright
from websockets.sync.client import connect
from websockets.typing import Origin

from benchmarks.publisher import publishers
from benchmarks.report import Row
from tests.browser.portal import ADMIN, PASSWORD, Portal, prepare_data
from tests.support.browser import CHROMIUM_ARGS
from tests.support.programs import find_program
from tests.support.waiting import wait_until

STREAMS, BLOCKS, EVENTS = 128, 256, 1.0
INSTANCES, DECISIONS, FEW_DECISIONS = 50, 200.0, 10.0
SETTLE_SECONDS, SECONDS = 8.0, 16.0
PAGES, ROUNDS = (0, 1, 10), 4
TICKS = os.sysconf("SC_CLK_TCK")

_WATCH_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({type: "longtask", buffered: true});
"""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def share(pid: int, seconds: float = SECONDS) -> float:
    """Percent of a core that a process uses for some time from now."""
    before, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - begun) * 100


def call(base: str, method: str, path: str, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    request = Request(f"{base}/v1/internal/{path}", json.dumps(body).encode(), headers, method=method)  # noqa: S310
    with urlopen(request, timeout=10) as answer:  # noqa: S310
        answer.read()


def names() -> list[str]:
    return [f"10.1.0.{number}:8000" for number in range(INSTANCES)]


def register_all(base: str) -> None:
    for number, name in enumerate(names()):
        kind = number % 2 + 1
        body = {"name": name, "incarnation_id": "i", "type": kind, "dp_size": 1, "ttl_s": 3600}
        call(base, "PUT", f"instances/{name}", body)


def drive(base: str, rate: float) -> None:
    """Heartbeats of every instance once a second and decisions, until the parent ends."""
    due = beat_due = time.monotonic()
    waiting = 0
    while os.getppid() != 1:
        now = time.monotonic()
        if now >= beat_due:
            waiting += 1
            for number, name in enumerate(names()):
                load = {"waiting_requests_num": (waiting + number) % 9, "gpu_cache_usage_perc": 0.5}
                body = {"name": name, "incarnation_id": "i", "load_metrics": load}
                call(base, "POST", "instances/heartbeat", body)
            beat_due += 1.0
        while due <= now:
            call(base, "POST", "routing/select", {"token_ids": list(range(512))})
            due += 1.0 / rate
        time.sleep(0.002)


@contextmanager
def driver(base: str, rate: float) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.ops_page", base, str(rate)]) as process:
        try:
            yield
        finally:
            process.kill()


class Reader:
    """A page without a browser: it receives states, and acknowledges each at once."""

    def __init__(self, base: str, cookie: str) -> None:
        self.bytes = 0
        self.received = 0
        self._socket = connect(
            f"ws{base[4:]}/ws/ops/",
            origin=Origin(base),
            additional_headers={"Cookie": cookie},
            max_size=None,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for text in self._socket:
            self.bytes = len(text)
            self.received += 1
            version = json.loads(text)["version"]
            self._socket.send(json.dumps({"type": "ack", "version": version}))

    def close(self) -> None:
        self._socket.close()


def shares(pid: int, base: str, cookie: str) -> tuple[list[list[float]], int]:
    """Percent of a core with none, one and ten pages open, in turns: the load alone wanders by more than a
    page costs. And the size of a state."""
    found: list[list[float]] = [[] for _ in PAGES]
    size = 0
    for _ in range(ROUNDS):
        for number, used in zip(PAGES, found, strict=True):
            readers = [Reader(base, cookie) for _ in range(number)]
            time.sleep(1)
            used.append(share(pid, SECONDS / 2))
            for reader in readers:
                assert reader.received > SECONDS / 4, (
                    f"a page got {reader.received} states in {SECONDS / 2:.0f} s"
                )
            for reader in readers:
                size = reader.bytes
                reader.close()
    return found, size


def signed_in(browser: Browser, base: str) -> Page:
    """The Operations page, with all streams synchronized and long tasks being noted."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{base}/admin/login/")
    page.fill("#id_username", ADMIN)
    page.fill("#id_password", PASSWORD)
    page.click("[type=submit]")
    page.wait_for_selector(f"text=All {STREAMS} streams are synchronized", timeout=60_000)
    page.add_init_script(_WATCH_LONG_TASKS)
    page.reload()
    return page


@contextmanager
def portal_with(template: Path, events: float) -> Iterator[Portal]:
    """A portal with all streams, each with so many events a second, and all instances."""
    flags = ["--load-balance-policy", "CAR", "--server", os.environ.get("BENCH_SERVER", "daphne")]
    with (
        tempfile.TemporaryDirectory() as directory,
        publishers(STREAMS, BLOCKS, events, "10.1.1.1") as specs,
        Portal(Path(directory), template, specs, flags=flags) as portal,
    ):
        register_all(portal.base)
        yield portal


def in_browser(portal: Portal, browser: Browser) -> list[Row]:
    """What the page costs the browser under the full load."""
    with driver(portal.base, DECISIONS):
        page = signed_in(browser, portal.base)
        wait_until(lambda: page.locator("#ops-decisions [data-key]").count() > 10, 60)
        time.sleep(SETTLE_SECONDS)
        loading = page.evaluate("window.longTasks.splice(0)")
        loaded = share(portal.process.pid)
        tasks = page.evaluate("window.longTasks")
        page.close()
    return [
        Row("OPS", "longest task in the browser while the page runs", max(tasks, default=0.0), "ms", 200),
        Row("OPS", "longest task while it loads", max(loading, default=0.0), "ms"),
        Row("OPS", f"server at {DECISIONS:.0f} decisions/s, with that page", loaded, "% core"),
    ]


def on_server(portal: Portal, browser: Browser) -> list[Row]:
    """What pages cost the server."""
    page = signed_in(browser, portal.base)
    cookie = "; ".join(f"{each['name']}={each['value']}" for each in page.context.cookies())
    page.close()
    with driver(portal.base, FEW_DECISIONS):
        (none, one, ten), size = shares(portal.process.pid, portal.base, cookie)
    base, wander = median(none), max(none) - min(none)
    cost = median(one) - base
    return [
        Row("OPS", f"server at {FEW_DECISIONS:.0f} decisions/s (wanders by {wander:.1f})", base, "% core"),
        Row("OPS", "one page more", cost, "% core", 5),
        Row("OPS", "ten pages more", median(ten) - base, "% core", 10 * max(cost, 1.0)),
        Row("OPS", "size of a state", size / 1024, "KiB"),
    ]


def run() -> list[Row]:
    chromium = find_program("chromium")
    assert chromium is not None, "Chromium is not installed"
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        template = Path(directory) / "template"
        prepare_data(template)
        browser = playwright.chromium.launch(executable_path=chromium, args=[*CHROMIUM_ARGS])
        with portal_with(template, EVENTS) as portal:
            rows = in_browser(portal, browser)
        with portal_with(template, 0.0) as portal:
            rows += on_server(portal, browser)
        browser.close()
    return rows


if __name__ == "__main__":
    drive(sys.argv[1], float(sys.argv[2]))
