"""A real browser on a real portal that follows simulated engines over TCP.

Whatever a test does, its pages may neither log an error nor ask another host for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from streams.simulator.engine import SimulatedEngine
from streams.spec import StreamSpec
from tests.browser.portal import PASSWORD, Portal, beat, prepare_data, register
from tests.support.browser import CHROMIUM_ARGS

TIMEOUT_MS = 15_000


@dataclass
class Site:
    """A portal with its engines; the first engine has two ranks."""

    portal: Portal
    engines: list[SimulatedEngine]

    @property
    def base(self) -> str:
        return self.portal.base

    def name(self, engine: int, rank: int = 0) -> str:
        return f"{instance_name(engine)}/dp{rank}"


def instance_name(engine: int) -> str:
    return f"10.0.0.{engine + 1}:8000"


LONG_NAME = "decode-llama-3-1-405b-instruct-fp8-pool-b-7f9c6d5b8-x2x4q.inference.svc.cluster.local:8000"


def route_some(portal: Portal) -> None:
    """Two instances, one of them with a name as clusters make them, some decisions and a report."""
    for number, name in enumerate((instance_name(0), LONG_NAME)):
        register(portal, name)
        beat(portal, name, waiting=number)
    for number in range(4):
        decision = portal.call("POST", "routing/select", {"token_ids": list(range(500))})
        report = {"action": "FINISH_DECODE", "cached_tokens": 100 * number}
        portal.call("POST", f"routing/requests/{decision['request_id']}/progress", report)


def specs_of(engines: list[SimulatedEngine]) -> list[StreamSpec]:
    return [
        engine.spec(rank, instance_name(number))
        for number, engine in enumerate(engines)
        for rank in range(len(engine.ranks))
    ]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a migrated database and users, to be copied."""
    path = tmp_path_factory.mktemp("portal") / "template"
    prepare_data(path)
    return path


@pytest.fixture(scope="session")
def site(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One portal for all tests that leave it as they found it."""
    engines = [SimulatedEngine(seed=n, dp_size=2 if n == 0 else 1, host_blocks=128) for n in range(3)]
    try:
        for engine in engines:
            engine.start(20)
        explain = {"KVPORTAL_DECISION_EXPLAIN_SHARE": "1", "KVPORTAL_RECORD_PROMPTS": "true"}
        directory = tmp_path_factory.mktemp("site")
        with Portal(directory, template, specs_of(engines), variables=explain) as portal:
            route_some(portal)
            yield Site(portal, engines)
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*CHROMIUM_ARGS])
        yield browser
        browser.close()


@dataclass
class Tabs:
    """Opens pages and notes what must not happen in any of them."""

    browser: Browser
    complaints: list[str] = field(default_factory=list)
    forgiven: list[str] = field(default_factory=list)
    """Parts of console errors that a test provokes on purpose."""
    _contexts: list[BrowserContext] = field(default_factory=list)
    _cookies: dict[tuple[str, str], Any] = field(default_factory=dict)

    def open(self, base: str, path: str = "/admin/", *, user: str | None = None, **options: Any) -> Page:
        context = self.browser.new_context(**options)
        context.set_default_timeout(TIMEOUT_MS)
        self._contexts.append(context)
        page = context.new_page()
        self._watch(page, base)
        if user is not None:
            self._sign_in(page, base, user)
        page.goto(base + path)
        return page

    def _sign_in(self, page: Page, base: str, user: str) -> None:
        """By the form the first time, by the same session afterwards: passwords are slow on purpose."""
        if (base, user) not in self._cookies:
            page.goto(f"{base}/admin/login/")
            page.fill("#id_username", user)
            page.fill("#id_password", PASSWORD)
            page.click("[type=submit]")
            self._cookies[base, user] = page.context.cookies()
        page.context.add_cookies(self._cookies[base, user])

    def _watch(self, page: Page, base: str) -> None:
        host = urlsplit(base).netloc

        def request(url: str) -> None:
            parts = urlsplit(url)
            if parts.netloc != host and parts.scheme not in ("data", "blob"):
                self.complaints.append(f"asked another host: {url}")

        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        page.on("request", lambda made: request(made.url))
        page.on("websocket", lambda socket: request(socket.url))
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on("console", said)

    def settle(self) -> list[str]:
        """Close all pages; what there was to complain about, except for what was forgiven."""
        for context in self._contexts:
            context.close()
        self._contexts.clear()
        found = [text for text in self.complaints if not any(part in text for part in self.forgiven)]
        self.complaints, self.forgiven = [], []
        return found


@pytest.fixture(scope="package")
def all_tabs(browser: Browser) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def tabs(all_tabs: Tabs) -> Iterator[Tabs]:
    yield all_tabs
    assert all_tabs.settle() == []


Stopwatch = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def stopwatch() -> Stopwatch:
    """`with stopwatch("a fault is shown"):` prints how long the block took; `pytest -rP` shows it."""

    @contextmanager
    def measured(what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        print(f"{time.monotonic() - began:6.2f} s until {what}")  # noqa: T201 - the figure is what this is for

    return measured


@pytest.fixture
def visit(site: Site, tabs: Tabs) -> Callable[..., Page]:
    """`visit(path, user=...)` on the shared portal."""
    return lambda path="/admin/", user="admin", **options: tabs.open(site.base, path, user=user, **options)


@pytest.fixture
def make_portal(template: Path, tmp_path: Path) -> Iterator[Callable[..., Portal]]:
    """Portals of a test's own, stopped at its end."""
    made: list[Portal] = []

    def make(streams: Any = (), **options: Any) -> Portal:
        directory = tmp_path / f"portal-{len(made)}"
        directory.mkdir()
        made.append(Portal(directory, template, streams, **options))
        return made[-1].start()

    yield make
    for portal in made:
        portal.stop()
