"""The admin of replicas, and the admin site's own name."""

from __future__ import annotations

import time
from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString

from kvportal.models import Replica
from kvportal.opsstate import REPLICA_GONE_SECONDS
from routing.decision_models import Decision
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
    fields = ("name", "started_at", "heartbeat_at", "synchronized", "state")

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.decision_view)
        return [path("decision/", view, name="kvportal_replica_decision"), *super().get_urls()]

    def decision_view(self, request: HttpRequest) -> HttpResponse:
        """The page of a routing decision by its ID. The newest are on the Operations page before they are
        in the database."""
        decision_id = request.GET.get("id", "")
        row = Decision.objects.filter(decision_id=decision_id).values_list("pk", flat=True).first()
        if row is not None:
            return HttpResponseRedirect(reverse("admin:routing_decision_change", args=[row]))
        text = f"Decision {decision_id} is not in the database: it was made a moment ago, or too long ago."
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(reverse("admin:routing_decision_changelist"))

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
