"""Fixtures that several test packages share, and the rule for programs that are not installed.

A test that needs a program says so with `@pytest.mark.needs("etcd")` or by using one of the fixtures below.
Where the program is missing the test is skipped and named in the summary; with `CI=true` it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import EtcdServer, PostgresServer, RedisServer, reachable_directory
from tests.support.programs import find_program, missing_programs, missing_text, skips_are_failures

_untested = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_untested] = {}


def require_programs(config: pytest.Config, *names: str) -> None:
    """Skip, or under CI fail, the running test when one of the programs is missing."""
    missing = missing_programs(names)
    if not missing:
        return
    text = missing_text(missing)
    if skips_are_failures():
        pytest.fail(f"{text}; with CI=true every test must run", pytrace=False)
    counts = config.stash[_untested]
    counts[text] = counts.get(text, 0) + 1
    pytest.skip(text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        require_programs(item.config, *marker.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_untested]
    if not counts:
        return
    terminalreporter.section("NOT TESTED ON THIS MACHINE", sep="!", red=True, bold=True)
    for text, count in sorted(counts.items()):
        terminalreporter.line(f"{count} test(s) skipped, {text}", red=True)


@pytest.fixture
def etcd_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of this test's own, so that the test may kill, freeze or restart it."""
    require_programs(request.config, "etcd")
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture
def redis_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own."""
    require_programs(request.config, "redis-server")
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """One PostgreSQL for all tests, because making a cluster takes seconds; use databases of your own."""
    require_programs(request.config, "postgres")
    with reachable_directory() as directory, PostgresServer(directory) as server:
        yield server


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> str:
    """Path of the Chromium executable; start it with `tests.support.browser.CHROMIUM_ARGS`."""
    require_programs(request.config, "chromium")
    path = find_program("chromium")
    assert path is not None
    return path
