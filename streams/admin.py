"""The admin of streams: a list with live state, one page each, resyncs with confirmation, the explorer.

The live state is joined in memory: however many streams a page lists, the number of queries is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from streams import display
from streams.admin_history import ResyncRequestAdmin, StreamStateChangeAdmin
from streams.console import console
from streams.models import Stream, StreamStateChange
from streams.prompt_text import MAX_TOKENS, PromptTextError, parse_prompt
from streams.readonly_admin import ReadOnlyAdmin
from streams.resync import ResyncOrder, ResyncSource, ResyncTarget, read_order
from streams.spec import StreamId
from streams.status import StreamState, StreamStatus

# Django looks for registrations in this module alone.
__all__ = ["ReadOnlyAdmin", "ResyncRequestAdmin", "StreamAdmin", "StreamStateChangeAdmin"]

NOT_FOLLOWED = "not_followed"
NEWEST_CHANGES = 100


def live_statuses() -> dict[StreamId, StreamStatus]:
    return {status.spec.id: status for status in console().statuses() or ()}


class LiveChangeList(ChangeList):
    """A change list whose rows carry their live status (`row.live`, None when not followed)."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        statuses = live_statuses()
        for row in self.result_list:
            row.live = statuses.get(row.stream_id)


class LiveStateFilter(admin.SimpleListFilter):
    """Filters by the state that is in memory now."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [*((str(state), str(state)) for state in StreamState), (NOT_FOLLOWED, "not followed")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Stream]) -> QuerySet[Stream]:
        statuses = live_statuses()
        if self.value() == NOT_FOLLOWED:
            return queryset.exclude(_rows_of(statuses))
        if self.value() is None:
            return queryset
        chosen = (stream for stream, status in statuses.items() if status.state == self.value())
        return queryset.filter(_rows_of(chosen))


def _rows_of(streams: Iterable[StreamId]) -> Q:
    """The rows of these streams, one term for each instance."""
    ranks: dict[str, list[int]] = {}
    for stream in streams:
        ranks.setdefault(stream.instance_name, []).append(stream.dp_rank)
    condition = Q(pk__in=())
    for name, found in ranks.items():
        condition |= Q(instance_name=name, dp_rank__in=found)
    return condition


@admin.register(Stream)
class StreamAdmin(ReadOnlyAdmin):
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
        if row.live is None:
            return display.badge("off", "not followed")
        return display.badge(row.live.state)

    @admin.display(description="since")
    def since(self, row: Any) -> str:
        return display.EMPTY if row.live is None else display.moment(row.live.since, time.time(), "")

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

    @admin.display(description="")
    def resync(self, row: Stream) -> SafeString:
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
        counted = live.counters if live else {}
        changes = StreamStateChange.objects.filter(instance_name=row.instance_name, dp_rank=row.dp_rank)
        return TemplateResponse(
            request,
            "admin/streams/stream/page.html",
            {
                **self.admin_site.each_context(request),
                "title": str(row),
                "opts": self.opts,
                "row": row,
                "changes": changes[:NEWEST_CHANGES],
                "counters": [(name, display.number(count)) for name, count in sorted(counted.items())],
                "changes_url": _filtered("streamstatechange", row.instance_name),
                "resyncs_url": _filtered("resyncrequest", row.instance_name),
                "may_resync": self.has_resync_permission(request),
            },
        )

    # ---- resync

    def has_resync_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("streams.resync_stream"))

    @admin.action(description="Force resync", permissions=["resync"])
    def force_resync(self, request: HttpRequest, queryset: QuerySet[Stream]) -> HttpResponse | None:
        """Asks first; the confirmation posts the same action again, with `confirmed`."""
        rows = list(queryset)
        if "confirmed" not in request.POST:
            return self._ask(request, rows)
        self._order(request, rows)
        return None

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("resync/", wrap(require_POST(self.resync_api)), name="streams_stream_resync_api"),
            path("explorer/", wrap(self.explorer_view), name="streams_stream_explorer"),
            path("explore/", wrap(require_POST(self.explore_api)), name="streams_stream_explore"),
            path("find/", wrap(self.find), name="streams_stream_find"),
            path("<int:pk>/resync/", wrap(self.resync_view), name="streams_stream_resync"),
            path("<int:pk>/series/", wrap(self.series_view), name="streams_stream_series"),
            *super().get_urls(),
        ]

    def resync_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """One stream: asks, then orders."""
        if not self.has_resync_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Stream, pk=pk)
        if request.method != "POST":
            return self._ask(request, [row])
        self._order(request, [row])
        return HttpResponseRedirect(reverse("admin:streams_stream_changelist"))

    def resync_api(self, request: HttpRequest) -> JsonResponse:
        """The Operations page's order; see `read_order`."""
        if not self.has_resync_permission(request):
            return JsonResponse({"error": "Your account may not resynchronise streams."}, status=403)
        try:
            targets, drop = read_order(request.body)
        except ValueError as error:
            return JsonResponse({"error": str(error)}, status=400)
        order = ResyncOrder(request.user.get_username(), ResyncSource.PAGE, time.time(), targets, drop)
        return JsonResponse({"streams": console().order_resync(order), "scope": order.scope}, status=202)

    def _ask(self, request: HttpRequest, rows: list[Stream]) -> HttpResponse:
        return TemplateResponse(
            request,
            "admin/streams/stream/resync.html",
            {
                **self.admin_site.each_context(request),
                "title": "Force resync",
                "opts": self.opts,
                "rows": rows,
                "from_list": request.method == "POST",
                "action_checkbox_name": admin.helpers.ACTION_CHECKBOX_NAME,
            },
        )

    def _order(self, request: HttpRequest, rows: list[Stream]) -> None:
        targets = tuple(ResyncTarget(row.instance_name, row.dp_rank) for row in rows)
        drop = request.POST.get("drop") == "on"
        order = ResyncOrder(request.user.get_username(), ResyncSource.ADMIN, time.time(), targets, drop)
        console().order_resync(order)
        link = reverse("admin:streams_resyncrequest_changelist")
        text = format_html(
            'Resync ordered for {}. <a href="{}">The audit</a> shows what becomes of it.', order.scope, link
        )
        self.message_user(request, text, messages.SUCCESS)

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
