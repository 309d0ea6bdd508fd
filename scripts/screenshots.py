"""The pictures in docs/screenshots: the demo, seen through Chromium.

    .venv/bin/python -m scripts.screenshots [--to docs/screenshots] [--warm-up 75]

Runs the demo on a free port with a data directory of its own, lets it collect something for the charts, and
takes every page on a laptop and a phone, light and dark. On the Operations page one engine has lost an event
and does not answer for its snapshot. Everything that was started is ended, also when something fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from scripts.demo import CHECKOUT, USERNAME, answers
from scripts.demo_gateway import call, popular
from scripts.supervisor import Supervisor, free_ports
from tests.support.browser import CHROMIUM_ARGS
from tests.support.programs import find_program, missing_text

SIZES = {"desktop": (1440, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
START_SECONDS = 90.0
WARM_UP_SECONDS = 75.0
"""Enough for charts that show something, and for a few decisions that kept all candidates."""
LOST_SECONDS = 30.0
TIMEOUT_MS = 30_000


@dataclass(frozen=True)
class Demo:
    """A running demo."""

    url: str
    password: str
    engines: tuple[str, ...]
    """`host:port` of each, in order."""


@contextmanager
def running_demo(directory: Path) -> Iterator[Demo]:
    """The demo in a process of its own, until the end of the block."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    supervisor = Supervisor()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["KVPORTAL_DATA_DIR"] = str(directory / "data")
    try:
        command = [sys.executable, "-m", "scripts.demo", "--port", str(port)]
        supervisor.spawn("the demo", command, cwd=CHECKOUT, log=directory / "demo.log")
        wait(lambda: answers(f"{url}/readyz"), supervisor, "the demo does not become ready")
        password = (directory / "data" / "admin-password").read_text().strip()
        wait(lambda: len(instances(url)) == 3, supervisor, "the engines do not register")
        yield Demo(url, password, tuple(instances(url)))
    finally:
        supervisor.stop()


def instances(url: str) -> list[str]:
    return sorted(each["name"] for each in call(f"{url}/v1/internal/instances")["instances"])


def wait(ready: Callable[[], bool], supervisor: Supervisor, message: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        for dead in supervisor.newly_dead():
            raise SystemExit(dead.describe_end())
        if time.monotonic() > deadline:
            raise SystemExit(message)
        time.sleep(0.2)


def load_unevenly(demo: Demo) -> None:
    """Cache and queue speak for different engines: the idle one is new, and its cache is still filling."""
    for engine, waiting in zip(demo.engines, (9, 3, 0), strict=True):
        call(f"http://{engine}/faults", {"fault": "load", "waiting_requests_num": waiting})
    newest = f"http://{demo.engines[-1]}/faults"
    call(newest, {"fault": "clear"})
    call(newest, {"fault": "rate", "events_per_second": 1})


def ask_for(demo: Demo, seconds: float) -> None:
    """Requests and queries for all prompts alike, beside those of the demo, which prefer the popular ones."""
    rng, deadline = random.Random(7), time.monotonic() + seconds
    prompts = popular(demo.engines[0])
    while time.monotonic() < deadline:
        body = {"token_ids": rng.choice(prompts)["token_ids"]}
        chosen = call(f"{demo.url}/v1/internal/routing/select", body)
        call(f"{demo.url}/v1/internal/kv-cache/query", body)
        progress = f"{demo.url}/v1/internal/routing/requests/{chosen['request_id']}/progress"
        call(progress, {"action": "FINISH_DECODE"})
        time.sleep(0.05)


def most_contested(demo: Demo) -> list[int]:
    """The prompt of which the engines hold the most different parts."""

    def spread(prompt: dict[str, Any]) -> float:
        matches = call(f"{demo.url}/v1/internal/kv-cache/query", {"token_ids": prompt["token_ids"]})[
            "matches"
        ]
        held = [(m["device_hit_tokens"], m["host_only_hit_tokens"]) for m in matches]
        return float(len(set(held)) + sum(host > 0 for _, host in held)) + max(map(sum, held)) / 1e6

    token_ids: list[int] = max(popular(demo.engines[0]), key=spread)["token_ids"]
    return token_ids


@contextmanager
def lost_stream(engine: str) -> Iterator[None]:
    """One engine loses an event and leaves the portal without an answer for a snapshot."""
    faults = f"http://{engine}/faults"
    call(faults, {"fault": "snapshots", "kind": "silent"})
    call(faults, {"fault": "skip_sequence"})
    time.sleep(LOST_SECONDS)
    try:
        yield
    finally:
        call(faults, {"fault": "snapshots", "kind": "good"})


# ---- the pages


def show_operations(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.url}/admin/")
    expect(page.locator("#ops-verdict")).to_have_attribute("data-tone", "bad", timeout=TIMEOUT_MS)
    expect(page.locator('[data-card="decisions"] canvas')).to_be_visible(timeout=TIMEOUT_MS)


def show_stream(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.url}/admin/streams/stream/find/?instance={demo.engines[0]}&rank=0")
    expect(page.locator("#ops-state")).to_have_text("synchronized", timeout=TIMEOUT_MS)
    expect(page.locator("#ops-chart-lag canvas")).to_be_visible(timeout=TIMEOUT_MS)


def show_explorer(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.url}/admin/streams/stream/explorer/")
    page.get_by_label("Token IDs").fill(json.dumps(most_contested(demo) + list(range(600))))
    page.get_by_role("button", name="Look up").click()
    expect(page.locator(".explorer-routing")).to_be_visible(timeout=TIMEOUT_MS)


def show_lab(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.url}/admin/routing/decision/lab/?lambda=0.2&host_weight=0.5&newest=200")
    expect(page.locator(".ops-verdict-title")).to_be_visible(timeout=TIMEOUT_MS)


PAGES: dict[str, Callable[[Page, Demo], None]] = {
    "stream": show_stream,
    "explorer": show_explorer,
    "lab": show_lab,
}


def take(browser: Browser, demo: Demo, name: str, show: Callable[[Page, Demo], None], to: Path) -> None:
    """One page in every size and scheme."""
    for size, (width, height) in SIZES.items():
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        page = context.new_page()
        sign_in(page, demo)
        show(page, demo)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.wait_for_timeout(400)  # colours move over a fifth of a second
            path = to / f"{name}-{size}-{scheme}.png"
            page.screenshot(path=path, animations="disabled", caret="hide")
            print(f"{path}  {path.stat().st_size // 1024} KiB", flush=True)
        context.close()


def sign_in(page: Page, demo: Demo) -> None:
    page.goto(f"{demo.url}/admin/login/")
    page.fill("#id_username", USERNAME)
    page.fill("#id_password", demo.password)
    page.click("[type=submit]")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Take the pictures in docs/screenshots.")
    parser.add_argument("--to", type=Path, default=CHECKOUT / "docs" / "screenshots")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS, help="seconds before the first one")
    options = parser.parse_args(arguments)
    chromium = find_program("chromium")
    if chromium is None:
        print(missing_text(["chromium"]), file=sys.stderr)
        return 1
    options.to.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        running_demo(Path(directory)) as demo,
        sync_playwright() as playwright,
    ):
        load_unevenly(demo)
        ask_for(demo, options.warm_up)
        browser = playwright.chromium.launch(executable_path=chromium, args=[*CHROMIUM_ARGS])
        for name, show in PAGES.items():
            take(browser, demo, name, show, options.to)
        with lost_stream(demo.engines[1]):
            take(browser, demo, "operations", show_operations, options.to)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
