"""The routing app."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import transaction
from django.db.models.signals import post_delete, post_save


class RoutingConfig(AppConfig):
    name = "routing"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        entered = self.get_model("Instance")
        for signal in (post_save, post_delete):
            signal.connect(_tell_the_portal, sender=entered, dispatch_uid="routing.entered_instances")


def _tell_the_portal(**_: Any) -> None:
    """The running portal, if it is this process, reads the entered instances again."""
    from routing.console import console

    def tell() -> None:
        running = console()
        if running is not None:
            running.reload_entered()

    transaction.on_commit(tell)
