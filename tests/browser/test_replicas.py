"""Two portals that share a PostgreSQL and a Redis, as in production."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import pytest
from playwright.sync_api import expect

from streams.simulator.engine import SimulatedEngine
from tests.browser.conftest import Tabs, specs_of
from tests.browser.portal import ADMIN, Portal, prepare_data
from tests.support.processes import PostgresServer, RedisServer
from tests.support.waiting import wait_until

SOON_MS = 20_000


@pytest.fixture
def engine() -> Iterator[SimulatedEngine]:
    with SimulatedEngine(seed=7) as engine:
        engine.step(5)
        yield engine


@pytest.fixture
def database(postgres: PostgresServer, tmp_path: Path) -> str:
    """A database of this test's own, migrated."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS replicas WITH (FORCE)")
        connection.execute("CREATE DATABASE replicas")
    url = postgres.url("replicas")
    prepare_data(tmp_path / "prepared", KVPORTAL_DATABASE_URL=url)
    return url


@pytest.fixture
def pair(
    engine: SimulatedEngine,
    database: str,
    redis_server: RedisServer,
    make_portal: Callable[..., Portal],
) -> list[Portal]:
    shared = {"KVPORTAL_DATABASE_URL": database, "KVPORTAL_REDIS_URL": redis_server.url}
    return [
        make_portal(specs_of([engine]), variables={**shared, "KVPORTAL_REPLICA_NAME": name})
        for name in ("east", "west")
    ]


def outcomes(database: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database) as connection:
        return connection.execute(
            "SELECT request_id, replica, state, reached FROM streams_resyncresult ORDER BY replica"
        ).fetchall()


def order(portal: Portal) -> None:
    url = f"{portal.base}/v1/internal/streams/resync"
    with urlopen(Request(url, b"{}", {"Content-Type": "application/json"})) as answer:
        assert json.load(answer) == {"streams": 1}


def test_replicas_share_orders_and_see_each_other(
    pair: list[Portal], database: str, redis_server: RedisServer, engine: SimulatedEngine, tabs: Tabs
) -> None:
    east, west = pair
    page = tabs.open(east.base, user=ADMIN)
    verdict, replicas = page.locator("#ops-verdict"), page.locator("#ops-replicas")
    expect(verdict).to_have_attribute("data-tone", "good", timeout=SOON_MS)
    expect(replicas).to_contain_text("west", timeout=SOON_MS)

    # An order given to one reaches both, and each leaves its outcome.
    order(west)
    wait_until(
        lambda: [row[1:] for row in outcomes(database)] == [("east", "done", 1), ("west", "done", 1)],
        20,
        lambda: str(outcomes(database)),
    )

    # The same without the channel layer: the database carries it.
    redis_server.kill()
    order(west)
    wait_until(
        lambda: [row[2] for row in outcomes(database)] == ["done"] * 4, 30, lambda: str(outcomes(database))
    )
    expect(page.locator("#ops-banners")).to_contain_text("Orders reach other replicas late", timeout=SOON_MS)

    # A replica that dies is shown as gone.
    west.process.kill()
    expect(replicas.locator('[data-key="west"]')).to_contain_text("gone", timeout=40_000)
    expect(replicas.locator('[data-key="east"]')).to_contain_text("running")
