"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http import shells


@pytest.fixture
def portal() -> Iterator[shells.Portal]:
    with shells.portal() as made:
        yield made


@pytest.fixture(params=["fast", "django"])
def ask(request):
    """Each way to ask the portal."""
    return {"fast": shells.ask_fast, "django": shells.ask_django}[request.param]
