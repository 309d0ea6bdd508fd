"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http import shells


@pytest.fixture(autouse=True, scope="package")
def machine_paths_first() -> Iterator[None]:
    from django.conf import settings

    ours = "kvportal.middleware.MachinePathsMiddleware"
    with pytest.MonkeyPatch.context() as patch:
        if ours not in settings.MIDDLEWARE:
            patch.setattr(settings, "MIDDLEWARE", [ours, *settings.MIDDLEWARE])
        yield


@pytest.fixture
def portal() -> Iterator[shells.Portal]:
    with shells.portal() as made:
        yield made


@pytest.fixture(params=["fast", "django"])
def ask(request):
    """Each way to ask the portal."""
    return {"fast": shells.ask_fast, "django": shells.ask_django}[request.param]
