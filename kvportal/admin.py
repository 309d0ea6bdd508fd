"""The admin of replicas, and the admin site's own name."""

from __future__ import annotations

import time
from typing import Any

from django.contrib import admin
from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from kvportal.models import Replica
from kvportal.opsstate import REPLICA_GONE_SECONDS
from streams import display
from streams.admin import ReadOnlyAdmin
from streams.status import StreamState

admin.site.site_header = "kvportal"
admin.site.site_title = "kvportal"
admin.site.index_title = "Operations"
admin.site.site_url = None
admin.site.enable_nav_sidebar = False  # the portal's own navigation is in the header


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    """Portal processes and what each of them sees."""

    list_display = ("name", "presence", "heartbeat", "started", "synchronized")
    search_fields = ("name",)
    fields = ("name", "presence", "started_at", "heartbeat_at", "synchronized", "seen")

    @admin.display(description="state")
    def presence(self, row: Replica) -> SafeString:
        if time.time() - row.heartbeat_at.timestamp() > REPLICA_GONE_SECONDS:
            return display.badge("bad", "gone")
        return display.badge("good", "running")

    @admin.display(description="last heartbeat", ordering="heartbeat_at")
    def heartbeat(self, row: Replica) -> str:
        return display.moment(row.heartbeat_at.timestamp(), time.time())

    @admin.display(description="started", ordering="started_at")
    def started(self, row: Replica) -> str:
        return display.moment(row.started_at.timestamp(), time.time())

    @admin.display(description="streams synchronized")
    def synchronized(self, row: Any) -> str:
        streams = row.state.get("streams", {}).values()
        return f"{sum(s.get('state') == StreamState.SYNCHRONIZED for s in streams)} of {len(streams)}"

    @admin.display(description="streams as it sees them")
    def seen(self, row: Any) -> SafeString | str:
        streams = row.state.get("streams", {})
        if not streams:
            return "It follows none."
        now = time.time()
        rows = [
            {
                "name": name,
                "badge": display.badge(stream["state"]),
                "since": display.moment(stream["since"], now, ""),
                "sequence": display.number(stream["sequence"]),
                "device": display.number(stream["device"]),
                "host": display.number(stream["host"]),
                "error": stream["error"] or display.EMPTY,
            }
            for name, stream in sorted(streams.items())
        ]
        return render_to_string("admin/kvportal/replica/streams.html", {"rows": rows})
