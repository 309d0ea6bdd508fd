"""The admin of instances; that of decisions is in `admin_decisions`.

The list shows every instance that is known now, wherever it registered, and below it the rows that
people entered for the embedded registry.
"""

from __future__ import annotations

import time
from typing import Any

from django.contrib import admin, messages
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from routing.admin_decisions import DecisionAdmin
from routing.console import Console, console
from routing.instances.model import HealthState, InstanceView, Load
from routing.models import Instance
from streams import display

__all__ = ["DecisionAdmin", "InstanceAdmin"]

FIELDS = ("name", "enabled", "role", "dp_size", "ttl_s", "incarnation_id", "backend", "note")
EMBEDDED = (
    "An instance that is entered here is registered when it is saved and whenever the portal starts. If one "
    "registers itself over HTTP (PUT) under the same address, its own registration counts, whichever came "
    "first, for as long as that instance is known. Then what is entered here counts again."
)
ETCD = "This portal takes its instances from etcd: what is entered here is kept and has no effect."

TONES = {HealthState.ACTIVE: "good", HealthState.LEASE_LOST: "warn", HealthState.SUSPECT: "bad"}


def state_badge(view: InstanceView) -> SafeString:
    return display.badge(TONES[view.state], str(view.state))


def load_text(load: Load | None) -> str:
    """Load in words; whether it can be right is said."""
    if load is None:
        return "no report yet"
    text = f"{load.waiting_requests_num:,} waiting, cache {load.gpu_cache_usage_perc:.0%}"
    return f"{text} ({load.source})" if load.valid else f"{text} (cannot be right)"


def live_rows(running: Console) -> list[dict[str, Any]]:
    """One row for each known instance, in name order."""
    exclusions, offset, now = running.exclusions(), time.time() - time.monotonic(), time.time()
    return [
        {
            "view": view,
            "badge": state_badge(view),
            "since": display.moment(view.since + offset, now, ""),
            "load": load_text(view.load),
            "excluded": exclusions.get(view.name),
        }
        for view in sorted(running.snapshot().instances, key=lambda view: view.name)
    ]


@admin.register(Instance)
class InstanceAdmin(admin.ModelAdmin):
    """Instances: what is known now, and what was entered by hand."""

    list_display = ("name", "enabled", "role", "dp_size", "state", "load", "note")
    list_filter = ("enabled", "role")
    search_fields = ("name", "note")
    search_help_text = "Address or note"
    list_per_page = 200
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/routing/instance/change_list.html"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        running = console()
        extra = {
            "live": None if running is None else live_rows(running),
            "source": None if running is None else running.status(),
            "title": "Instances",
        }
        return super().changelist_view(request, {**extra, **(extra_context or {})})

    def get_fieldsets(self, request: HttpRequest, obj: Instance | None = None) -> Any:
        """The form begins with what an entry is worth beside other registrations."""
        return ((None, {"fields": FIELDS, "description": _worth()}),)

    @admin.display(description="state")
    def state(self, row: Instance) -> SafeString:
        view = _view(row)
        return display.badge("off", "not known") if view is None else state_badge(view)

    @admin.display(description="load")
    def load(self, row: Instance) -> str:
        view = _view(row)
        return display.EMPTY if view is None else load_text(view.load)

    def save_model(self, request: HttpRequest, obj: Instance, form: ModelForm, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if _worth() == ETCD:
            self.message_user(request, ETCD, messages.WARNING)


def _worth() -> str:
    """What becomes of an entry in this portal; the usual where no portal runs in this process."""
    running = console()
    return EMBEDDED if running is None or running.status().kind == "embedded" else ETCD


def _view(row: Instance) -> InstanceView | None:
    running = console()
    return None if running is None else running.snapshot().by_name.get(row.name)
