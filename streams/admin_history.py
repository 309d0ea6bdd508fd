"""What happened to streams, read-only: the history of their states and the audit of resyncs."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from streams import display
from streams.models import ResyncRequest, ResyncResult, StreamStateChange
from streams.readonly_admin import ReadOnlyAdmin, titled
from streams.spec import StreamId


@admin.register(StreamStateChange)
class StreamStateChangeAdmin(ReadOnlyAdmin):
    """The history of all streams."""

    list_display = ("when", "stream", "from_state", "to_state", "what", "replica")
    list_filter = (titled("new_state", "new state"), titled("at", "time"))
    search_fields = ("instance_name", "sentence", "code", "detail", "replica")
    search_help_text = "Instance, reason or replica"
    fields = ("when", "stream", "from_state", "to_state", "what", "replica")

    @admin.display(description="stream", ordering="instance_name")
    def stream(self, row: StreamStateChange) -> str:
        return str(StreamId(row.instance_name, row.dp_rank))

    @admin.display(description="from", ordering="old_state")
    def from_state(self, row: StreamStateChange) -> str:
        return str(row.old_state)

    @admin.display(description="to", ordering="new_state")
    def to_state(self, row: StreamStateChange) -> SafeString:
        return display.badge(row.new_state)

    @admin.display(description="what happened", ordering="code")
    def what(self, row: StreamStateChange) -> SafeString:
        code = f" ({row.code})" if row.code else ""
        return format_html('{}{}<span class="kv-detail">{}</span>', row.sentence, code, row.detail)


class ResyncResultInline(admin.TabularInline):  # type: ignore[type-arg]
    """What became of an order, replica by replica."""

    model = ResyncResult
    extra = 0
    fields = ("replica", "at", "badge", "reached", "settled", "detail")
    readonly_fields = ("badge",)
    verbose_name_plural = "outcome on each replica"

    @admin.display(description="outcome")
    def badge(self, row: ResyncResult) -> SafeString:
        return display.badge(row.state, row.get_state_display())  # type: ignore[attr-defined]

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whoever may read an order may read what became of it."""
        return bool(request.user.has_perm("streams.view_resyncrequest"))  # type: ignore[union-attr]


@admin.register(ResyncRequest)
class ResyncRequestAdmin(ReadOnlyAdmin):
    """The audit: who had which streams resynchronised, and what became of it."""

    list_display = ("when", "actor", "source", "short_scope", "dropped", "outcome")
    list_filter = (
        titled("source", "source"),
        titled("drop", "index dropped first"),
        titled("results__state", "outcome"),
        titled("at", "time"),
    )
    search_fields = ("actor", "scope")
    search_help_text = "Who, or a stream"
    fields = ("when", "actor", "source", "scope", "dropped")
    inlines = (ResyncResultInline,)

    def get_queryset(self, request: HttpRequest) -> QuerySet[ResyncRequest]:
        return super().get_queryset(request).prefetch_related("results")

    @admin.display(description="streams", ordering="scope")
    def short_scope(self, row: ResyncRequest) -> str:
        return row.scope if len(row.scope) <= 80 else f"{row.scope[:77]}…"

    @admin.display(description="index dropped first", ordering="drop")
    def dropped(self, row: ResyncRequest) -> str:
        return "yes" if row.drop else "no"

    @admin.display(description="outcome")
    def outcome(self, row: ResyncRequest) -> SafeString | str:
        results = row.results.all()  # type: ignore[attr-defined]
        if not results:
            return display.badge("off", "no replica yet")
        parts = [
            format_html("{} {}", display.badge(result.state, result.get_state_display()), result.replica)
            for result in results
        ]
        return format_html("{}" + "<br>{}" * (len(parts) - 1), *parts)
