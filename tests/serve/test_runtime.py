"""The composition root in this process: what becomes of its parts when the database is away at the start."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from kvportal import runtime as runtime_module
from kvportal.config import load_config
from kvportal.runtime import Runtime
from routing.instances.embedded import Entry
from routing.instances.model import Registration
from tests.support.waiting import wait_until


@pytest.mark.django_db(transaction=True)
def test_instances_entered_in_the_admin_come_when_the_database_does(monkeypatch):
    answers = False

    def load() -> list[Entry]:
        if not answers:
            raise OperationalError("connection refused")
        return [Entry(Registration("10.0.0.7:8000"))]

    monkeypatch.setattr(runtime_module, "load_entered", load)
    monkeypatch.setattr(runtime_module, "ENTERED_SECONDS", 0.05)
    runtime = Runtime(load_config([], {}))
    runtime.start()
    try:
        assert "connection refused" in (runtime.status().error or "")
        assert not runtime.snapshot().instances
        answers = True
        wait_until(lambda: "10.0.0.7:8000" in runtime.snapshot().by_name)
        assert runtime.status().error is None
    finally:
        runtime.stop()
