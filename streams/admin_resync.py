"""Force resync in the admin: one stream, a selection, or what the Operations page orders.

What nobody follows any more cannot be resynchronised: it is refused at once and named, and the rest of a
selection is ordered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import get_object_or_404
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html

from streams.admin_live import is_followed
from streams.console import console
from streams.models import Stream
from streams.readonly_admin import ReadOnlyAdmin
from streams.resync import EVERY_STREAM, ResyncOrder, ResyncSource, ResyncTarget, matching, read_order
from streams.wording import some_of

NAMED = 5
"""So many streams are named in a sentence about those that are left out; the rest are counted."""


def parted(rows: Sequence[Stream]) -> tuple[list[Stream], list[Stream]]:
    """Those that can be resynchronised, and those that nobody follows any more."""
    followed = console().followed()
    gone = [row for row in rows if is_followed(row, followed) is False]
    return [row for row in rows if row not in gone], gone


def refusal(gone: Sequence[object]) -> str:
    """Why these streams are not resynchronised."""
    named = some_of(gone, NAMED)
    verb, them = ("is", "it") if len(gone) == 1 else ("are", "them")
    return f"{named} {verb} no longer followed, so there is nothing to resynchronise in {them}."


class ResyncAdmin(ReadOnlyAdmin):
    """What `StreamAdmin` does beside showing."""

    def has_resync_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("streams.resync_stream"))  # type: ignore[union-attr]

    @admin.action(description="Force resync", permissions=["resync"])
    def force_resync(self, request: HttpRequest, queryset: QuerySet[Stream]) -> HttpResponse | None:
        """Asks first; the confirmation posts the same action again, with `confirmed`."""
        rows, gone = parted(list(queryset))
        if rows and "confirmed" not in request.POST:
            return self._ask(request, rows, gone)
        if rows:
            self._order(request, rows)
        if gone:
            self.message_user(request, refusal(gone), messages.WARNING if rows else messages.ERROR)
        return None

    def resync_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """One stream: asks, then orders."""
        if not self.has_resync_permission(request):
            raise PermissionDenied
        row = get_object_or_404(Stream, pk=pk)
        rows, gone = parted([row])
        if gone:
            self.message_user(request, refusal(gone), messages.ERROR)
            return HttpResponseRedirect(reverse("admin:streams_stream_change", args=[pk]))
        if request.method != "POST":
            return self._ask(request, rows)
        self._order(request, rows)
        return HttpResponseRedirect(reverse("admin:streams_stream_changelist"))

    def resync_api(self, request: HttpRequest) -> JsonResponse:
        """The Operations page's order; see `read_order`. `left_out` names what nobody follows any more."""
        if not self.has_resync_permission(request):
            return JsonResponse({"error": "Your account may not resynchronise streams."}, status=403)
        try:
            targets, drop = read_order(request.body)
        except ValueError as error:
            return JsonResponse({"error": str(error)}, status=400)
        kept, gone = _parted_targets(targets)
        if not kept:
            sentence = refusal(gone) if targets != EVERY_STREAM else "No stream is followed now."
            return JsonResponse({"error": sentence}, status=404)
        order = ResyncOrder(request.user.get_username(), ResyncSource.PAGE, time.time(), kept, drop)
        reached = console().order_resync(order)
        left_out = [str(target) for target in gone]
        return JsonResponse({"streams": reached, "scope": order.scope, "left_out": left_out}, status=202)

    def _ask(self, request: HttpRequest, rows: list[Stream], gone: Sequence[Stream] = ()) -> HttpResponse:
        context: dict[str, Any] = {
            **self.admin_site.each_context(request),
            "title": "Force resync",
            "opts": self.opts,
            "rows": rows,
            "left_out": refusal(gone) if gone else "",
            "from_list": request.method == "POST",
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/streams/stream/resync.html", context)

    def _order(self, request: HttpRequest, rows: list[Stream]) -> None:
        targets = tuple(ResyncTarget(row.instance_name, row.dp_rank) for row in rows)
        drop = request.POST.get("drop") == "on"
        order = ResyncOrder(request.user.get_username(), ResyncSource.ADMIN, time.time(), targets, drop)
        console().order_resync(order)
        link = reverse("admin:streams_resyncrequest_changelist")
        text = format_html(
            'Resync ordered for {}. What becomes of it is under <a href="{}">Resyncs</a>.', order.scope, link
        )
        self.message_user(request, text, messages.SUCCESS)


def _parted_targets(
    targets: tuple[ResyncTarget, ...],
) -> tuple[tuple[ResyncTarget, ...], tuple[ResyncTarget, ...]]:
    """Targets that cover a stream which somebody follows, and the others."""
    followed = console().followed()
    if followed is None:
        return targets, ()
    kept = tuple(target for target in targets if matching((target,), followed))
    return kept, tuple(target for target in targets if target not in kept)
