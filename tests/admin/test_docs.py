"""docs/operations.md names things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.auth.models import Permission

from kvportal.config.flags import OPTIONS
from kvportal.config.site import VARIABLES

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_variables_are_those_that_are_read() -> None:
    known = {f"KVPORTAL_{option.name.upper()}" for option in OPTIONS} | set(VARIABLES)
    named = set(re.findall(r"KVPORTAL_[A-Z_]+", TEXT))
    assert named - known == set()
    assert {name for name in known if "RETENTION" in name} <= named


@pytest.mark.django_db
def test_permissions_are_those_that_are_asked_for() -> None:
    named = set(re.findall(r"`(\w+)\.((?:view|add|change|delete|resync)_\w+)`", TEXT))
    known = set(Permission.objects.values_list("content_type__app_label", "codename"))
    assert named
    assert named - known == set()


def test_flags_are_those_that_are_read() -> None:
    known = {f"--{option.name.replace('_', '-')}" for option in OPTIONS if option.flag}
    assert set(re.findall(r"--car-[a-z-]+|--instance-source", TEXT)) <= known
