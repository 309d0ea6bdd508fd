"""The admin of streams: a list with live state, one page each, the prefix explorer."""

from __future__ import annotations

import time
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import get_object_or_404
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from streams import display
from streams.admin_history import ResyncRequestAdmin, StreamStateChangeAdmin
from streams.admin_live import LiveChangeList, LiveStateFilter, is_followed, live_statuses
from streams.admin_resync import ResyncAdmin
from streams.console import console
from streams.models import Stream, StreamStateChange
from streams.prompt_text import MAX_TOKENS, PromptTextError, parse_prompt
from streams.readonly_admin import ReadOnlyAdmin
from streams.status import StreamStatus

# Django looks for registrations in this module alone.
__all__ = ["ReadOnlyAdmin", "ResyncRequestAdmin", "StreamAdmin", "StreamStateChangeAdmin"]

NEWEST_CHANGES = 100
ABSENT = {False: "no longer followed", True: "on another replica", None: "not known here"}
"""What is said of a stream that this process does not follow, by whether any replica does."""


@admin.register(Stream)
class StreamAdmin(ResyncAdmin):
    """Streams with their live state; the only thing to be done with one is a resync."""

    list_display: tuple[str, ...] = (
        "stream",
        "state",
        "since",
        "reason",
        "sequence",
        "device_blocks",
        "host_blocks",
        "last_snapshot",
    )
    list_filter = (LiveStateFilter,)
    search_fields = ("instance_name", "endpoint", "replay_endpoint")
    search_help_text = "Instance name or endpoint"
    actions = ("force_resync",)
    list_per_page = 200

    # ---- the list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LiveChangeList

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        return (*self.list_display, "resync") if self.has_resync_permission(request) else self.list_display

    @admin.display(description="stream", ordering="instance_name")
    def stream(self, row: Stream) -> str:
        return str(row)

    @admin.display(description="state")
    def state(self, row: Any) -> SafeString:
        if row.live is not None:
            return display.badge(row.live.state)
        return display.badge("off", ABSENT[row.followed])

    @admin.display(description="since")
    def since(self, row: Any) -> str:
        """Of its state; of a stream that nobody follows any more, when that was last done."""
        if row.live is not None:
            return display.moment(row.live.since, time.time(), "")
        return display.EMPTY if row.followed else display.moment(row.last_seen.timestamp(), time.time(), "")

    @admin.display(description="what is wrong")
    def reason(self, row: Any) -> str:
        return display.EMPTY if row.live is None else display.reason(row.live)

    @admin.display(description="sequence")
    def sequence(self, row: Any) -> str:
        return display.number(row.live and row.live.sequence)

    @admin.display(description="device blocks")
    def device_blocks(self, row: Any) -> str:
        return display.number(row.live and row.live.device_blocks)

    @admin.display(description="host blocks")
    def host_blocks(self, row: Any) -> str:
        return display.number(row.live and row.live.host_blocks)

    @admin.display(description="last snapshot")
    def last_snapshot(self, row: Any) -> str:
        snapshot = row.live and row.live.last_snapshot
        return display.EMPTY if snapshot is None else display.moment(snapshot.at, time.time())

    @admin.display(description="", empty_value="")
    def resync(self, row: Any) -> SafeString | str:
        if row.followed is False:
            return ""
        return format_html(
            '<a class="kv-button" href="{}" aria-label="Force resync of {}">Force resync</a>',
            reverse("admin:streams_stream_resync", args=[row.pk]),
            row,
        )

    # ---- one stream

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = get_object_or_404(Stream, pk=_number(object_id))
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, row):
            raise PermissionDenied
        live = live_statuses().get(row.stream_id)
        return TemplateResponse(
            request,
            "admin/streams/stream/page.html",
            {
                **self.admin_site.each_context(request),
                "title": str(row),
                "opts": self.opts,
                "row": row,
                "live": live,
                "followed": is_followed(row, console().followed()),
                "changes": _changes(row)[:NEWEST_CHANGES],
                "counters": _counters(live),
                "changes_url": _filtered("streamstatechange", row.instance_name),
                "resyncs_url": _filtered("resyncrequest", row.instance_name),
                "may_resync": self.has_resync_permission(request),
            },
        )

    def changes_view(self, request: HttpRequest, pk: int) -> JsonResponse:
        """What the page adds to itself when a stream has changed: `rows`, the state changes behind the row
        number `after`, newest first, and `counters`, both as the page shows them; `at`, when."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Stream, pk=pk)
        live = live_statuses().get(row.stream_id)
        later = _changes(row).filter(id__gt=_number(request.GET.get("after", "")))
        return JsonResponse(
            {
                "rows": _rendered("changes.html", changes=later[:NEWEST_CHANGES]),
                "counters": _rendered("counters.html", counters=_counters(live)),
                "at": round(time.time()),
            }
        )

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("resync/", wrap(require_POST(self.resync_api)), name="streams_stream_resync_api"),
            path("explorer/", wrap(self.explorer_view), name="streams_stream_explorer"),
            path("explore/", wrap(require_POST(self.explore_api)), name="streams_stream_explore"),
            path("find/", wrap(self.find), name="streams_stream_find"),
            path("<int:pk>/resync/", wrap(self.resync_view), name="streams_stream_resync"),
            path("<int:pk>/changes/", wrap(self.changes_view), name="streams_stream_changes"),
            path("<int:pk>/series/", wrap(self.series_view), name="streams_stream_series"),
            *super().get_urls(),
        ]

    # ---- prefix explorer

    def explorer_view(self, request: HttpRequest) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {**self.admin_site.each_context(request), "title": "Prefix explorer", "opts": self.opts}
        return TemplateResponse(request, "admin/streams/stream/explorer.html", context)

    def explore_api(self, request: HttpRequest) -> JsonResponse:
        """What the index holds of the token IDs in the body, as text. They are prompts: neither logged
        nor kept."""
        if not self.has_view_permission(request):
            return JsonResponse({"error": "Your account may not view streams."}, status=403)
        try:
            prompt = parse_prompt(request.body.decode())
        except (RequestDataTooBig, UnicodeDecodeError, PromptTextError) as error:
            return JsonResponse({"error": _explorer_refusal(error)})
        found = console().explore(prompt)
        if found is None:
            sentence = "This process has no index: it is off, or the portal does not serve here."
            return JsonResponse({"error": sentence}, status=503)
        return JsonResponse(found)

    # ---- for the page's scripts

    def find(self, request: HttpRequest) -> HttpResponse:
        """The page of a stream by its name and rank."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(
            Stream,
            instance_name=request.GET.get("instance", ""),
            dp_rank=_number(request.GET.get("rank", "")),
        )
        return HttpResponseRedirect(reverse("admin:streams_stream_change", args=[row.pk]))

    def series_view(self, request: HttpRequest, pk: int) -> JsonResponse:
        """The last ten minutes of one stream, by column; empty columns when nothing is known."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Stream, pk=pk)
        return JsonResponse({"series": console().series(row.stream_id)})


def _changes(row: Stream) -> QuerySet[StreamStateChange]:
    """The stream's history, newest first."""
    return StreamStateChange.objects.filter(instance_name=row.instance_name, dp_rank=row.dp_rank)


def _rendered(template: str, **context: object) -> str:
    """A part of a stream's page."""
    return render_to_string(f"admin/streams/stream/{template}", context)


def _counters(live: StreamStatus | None) -> list[tuple[str, str]]:
    return [(name, display.number(count)) for name, count in sorted(live.counters.items())] if live else []


def _explorer_refusal(error: Exception) -> str:
    if isinstance(error, PromptTextError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "That is not text. Paste the token IDs of a prompt, for example: 101, 2023, 318."
    return f"That is too much text. At most {MAX_TOKENS:,} token IDs can be looked up at once."


def _number(text: str) -> int:
    """A row's number; -1, which no row has, for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def _filtered(model: str, search: str) -> str:
    return f"{reverse(f'admin:streams_{model}_changelist')}?{urlencode({'q': search})}"
