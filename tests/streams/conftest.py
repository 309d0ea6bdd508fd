"""Fixtures of the stream tests: each closes what it made, however the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from streams.simulator import SimulatedEngine
from tests.streams.driven import Driven
from tests.streams.harness import Portal
from tests.streams.puppet import Puppet


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_portal(opened: ExitStack) -> Callable[..., Portal]:
    """Makes a portal with these limits."""
    return lambda **limits: opened.enter_context(Portal(**limits))


@pytest.fixture
def make_engine(opened: ExitStack) -> Callable[..., SimulatedEngine]:
    """Makes a simulated engine with these settings."""

    def make(**settings: Any) -> SimulatedEngine:
        return opened.enter_context(SimulatedEngine(**settings))

    return make


@pytest.fixture
def make_puppet(opened: ExitStack) -> Callable[..., Puppet]:
    return lambda **settings: opened.enter_context(Puppet(**settings))


@pytest.fixture
def portal(make_portal: Callable[..., Portal]) -> Portal:
    """A portal with the default limits."""
    return make_portal()


@pytest.fixture
def puppet(make_puppet: Callable[..., Puppet]) -> Puppet:
    return make_puppet()


@pytest.fixture
def driven() -> Iterator[Driven]:
    stream = Driven()
    yield stream
    stream.close()
