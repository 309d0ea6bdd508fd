"""Routing decisions in the admin: a list, and each decision's explanation for people. Read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import get_object_or_404
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from routing.admin_lab import lab_view
from routing.console import console
from routing.decision_models import Decision, RecordedPrompt
from routing.decision_store import DecisionStore
from routing.policies.decision import Policy, Side
from routing.records import ROUTED
from streams import display
from streams.readonly_admin import ReadOnlyAdmin, titled
from streams.wording import counted

SIDE_TITLES = {Side.PREFILL: "Prefill", Side.DECODE: "Decode"}


@admin.register(Decision)
class DecisionAdmin(ReadOnlyAdmin):
    """Who was chosen for which request, and why."""

    list_display = (
        "when",
        "short_id",
        "policy",
        "result",
        "hit_ratio",
        "queue",
        "score",
        "decode",
        "prompt_tokens",
        "predicted",
        "reported",
        "error",
    )
    list_display_links = ("short_id",)
    list_filter = (
        titled("policy", "policy"),
        titled("outcome", "outcome"),
        titled("full", "all candidates kept"),
        titled("at", "time"),
    )
    search_fields = ("decision_id", "request_id", "prefill_instance", "decode_instance")
    search_help_text = "Decision, request or instance"
    date_hierarchy = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Decision]:
        """Lists do without the explanations: a full one has 19 KB."""
        return super().get_queryset(request).defer("explanation")

    @admin.display(description="decision", ordering="decision_id")
    def short_id(self, row: Decision) -> str:
        return row.decision_id[:8]

    @admin.display(description="prefill", ordering="prefill_instance")
    def result(self, row: Decision) -> SafeString | str:
        return row.prefill_instance if row.outcome == ROUTED else display.badge("bad", "no candidates")

    @admin.display(description="decode", ordering="decode_instance")
    def decode(self, row: Decision) -> str:
        return row.decode_instance or display.EMPTY

    @admin.display(description="hit ratio", ordering="kv_hit_ratio")
    def hit_ratio(self, row: Decision) -> str:
        return decimal(row.kv_hit_ratio)

    @admin.display(description="queue cost", ordering="queue_cost")
    def queue(self, row: Decision) -> str:
        return decimal(row.queue_cost)

    @admin.display(description="score", ordering="prefill_score")
    def score(self, row: Decision) -> str:
        return decimal(row.prefill_score)

    @admin.display(description="prompt tokens", ordering="input_tokens")
    def prompt_tokens(self, row: Decision) -> str:
        return display.number(row.input_tokens)

    @admin.display(description="predicted hit", ordering="predicted_hit_tokens")
    def predicted(self, row: Decision) -> str:
        return display.number(row.predicted_hit_tokens)

    @admin.display(description="reported hit", ordering="cached_tokens")
    def reported(self, row: Decision) -> str:
        return display.number(row.cached_tokens)

    @admin.display(description="prediction error")
    def error(self, row: Decision) -> str:
        """In tokens."""
        return display.EMPTY if row.prediction_error is None else _signed(row.prediction_error)

    # ---- one decision, and the lab

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("find/", wrap(self.find), name="routing_decision_find"),
            path("lab/", wrap(self.lab), name="routing_lab"),
            path("prompt/", wrap(self.prompt), name="routing_decision_prompt"),
            *super().get_urls(),
        ]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request):
            raise PermissionDenied
        number = int(object_id) if object_id.isascii() and object_id.isdigit() and len(object_id) < 19 else -1
        return self._page(request, get_object_or_404(Decision, pk=number))

    def find(self, request: HttpRequest) -> HttpResponse:
        """The page of a decision by its ID: from the database, or from memory as long as it is not there."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        decision_id = request.GET.get("id", "")
        row = Decision.objects.filter(decision_id=decision_id).only("pk").first()
        if row is not None:
            return HttpResponseRedirect(reverse("admin:routing_decision_change", args=[row.pk]))
        running = console()
        record = running.decisions.find(decision_id) if running else None
        if record is not None:
            return self._page(request, DecisionStore().row(record))
        text = (
            f"Decision {decision_id[:64]} is neither in the database nor among the latest of this replica: "
            "it is beyond the retention, or another replica made it a moment ago."
        )
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(reverse("admin:routing_decision_changelist"))

    def prompt(self, request: HttpRequest) -> JsonResponse:
        """The token IDs of a decision by its ID, where an operator had them recorded: for the explorer."""
        if not _may_read_prompts(request):
            return JsonResponse({"error": "Your account may not read recorded prompts."}, status=403)
        row = RecordedPrompt.objects.filter(decision_id=request.GET.get("id", "")).first()
        if row is None:
            sentence = "No prompt is recorded for this decision, or it is beyond its retention."
            return JsonResponse({"error": sentence}, status=404)
        return JsonResponse({"token_ids": np.frombuffer(row.token_ids, "<u4").tolist()})

    def lab(self, request: HttpRequest) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return lab_view(request, {**self.admin_site.each_context(request), "opts": self.opts})

    def _page(self, request: HttpRequest, row: Decision) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": f"Decision {row.decision_id[:8]}",
            "opts": self.opts,
            "row": row,
            "facts": self._facts(row),
            "explained": render_explanation(row.explanation),
            "prompt_is_there": _may_read_prompts(request)
            and RecordedPrompt.objects.filter(decision_id=row.decision_id).exists(),
        }
        return TemplateResponse(request, "admin/routing/decision/page.html", context)

    def _facts(self, row: Decision) -> list[tuple[str, SafeString | str]]:
        return [
            ("Prefill", self.result(row)),
            ("Decode", row.decode_instance or "the prefill instance"),
            ("Policy", row.policy),
            ("Prompt tokens", display.number(row.input_tokens)),
            ("Predicted hit", display.number(row.predicted_hit_tokens)),
            ("Reported hit", display.number(row.cached_tokens)),
            ("Prediction error", _error_text(row)),
            ("Took", f"{row.seconds * 1000:.2f} ms"),
            ("Replica", row.replica or "this one"),
            ("Request", row.request_id),
            ("Decision", row.decision_id),
        ]


def _may_read_prompts(request: HttpRequest) -> bool:
    """Prompts are more than decisions: a permission of their own, beside that of the explorer."""
    return bool(
        request.user.has_perms(
            ("routing.view_decision", "routing.view_recordedprompt", "streams.view_stream")
        )
    )


def _signed(number: int) -> str:
    """With its sign, and a minus as wide as a plus; nothing before a zero."""
    return f"{number:+,}".replace("-", "−") if number else "0"


def _error_text(row: Decision) -> str:
    wrong = row.prediction_error
    return display.EMPTY if wrong is None else f"{_signed(wrong)} token{'' if abs(wrong) == 1 else 's'}"


def render_explanation(explanation: Mapping[str, Any]) -> SafeString:
    """An explanation as HTML: every candidate with its sum, every excluded instance with its reason."""
    sides = [
        {
            "title": SIDE_TITLES[side],
            "rows": [_candidate(row, explanation) for row in _ranked(explanation, side)],
            "left_out": explanation["candidates_num"][side] - len(_ranked(explanation, side)),
        }
        for side in Side
    ]
    excluded_num = sum(explanation["excluded_num"].values())
    context = {
        "explanation": explanation,
        "input_tokens": counted(explanation["input_tokens"], "prompt token"),
        "sides": [side for side in sides if side["rows"]],
        "excluded": explanation["excluded"],
        "excluded_left_out": excluded_num - len(explanation["excluded"]),
    }
    return render_to_string("admin/routing/decision/explanation.html", context)


def decimal(value: float | None) -> str:
    """Three digits are enough to compare; the exact value is in the API's explanation."""
    return display.EMPTY if value is None else f"{value:.3f}"


def _ranked(explanation: Mapping[str, Any], side: Side) -> list[Mapping[str, Any]]:
    """Chosen first, then by score where there is one."""
    rows = [row for row in explanation["candidates"] if row["side"] == side]
    return sorted(rows, key=lambda row: (not row["chosen"], row["score"] or 0.0))


def _candidate(row: Mapping[str, Any], explanation: Mapping[str, Any]) -> dict[str, Any]:
    role = row["role"] if row["role"] == row["current_role"] else f"{row['role']} as {row['current_role']}"
    return {
        "name": row["instance_name"],
        "role": role,
        "state": row["state"],
        "chosen": row["chosen"],
        "tied": row["equal_to_best"] and not row["chosen"],
        "sum": calculation(row, explanation),
        "ranks": _ranks(row),
    }


def calculation(row: Mapping[str, Any], explanation: Mapping[str, Any]) -> str:
    """What the candidate was judged by, with the numbers filled in."""
    if explanation["policy"] == Policy.RR:
        steps = row["steps_until_turn"]
        return "its turn" if steps == 0 else f"its turn in {steps} more"
    if explanation["policy"] == Policy.SLO_AWARE:
        return _predicted_times(row)
    load = row["load"]
    queue = f"{load['waiting_requests_num']} of {explanation['longest_queue'][row['side']]} waiting"
    if row["side"] == Side.DECODE:
        usage = f"cache usage {load['gpu_cache_usage_perc']:.3f}"
        return f"{usage} + queue {row['queue_cost']:.3f} ({queue}) = {row['score']:.4f}"
    weight = explanation["settings"]["car_prefill_lambda"]
    return (
        f"{weight:g} * (1 - hit ratio {row['kv_hit_ratio']:.3f}) + {1 - weight:g} * queue "
        f"{row['queue_cost']:.3f} ({queue}) = {row['score']:.4f}"
    )


def _predicted_times(row: Mapping[str, Any]) -> str:
    work = row["work"]
    if row["side"] == Side.PREFILL:
        return (
            f"{work['estimated_prefill_time']:.1f} ms of prefill before it "
            f"({counted(work['prefill_request_num'], 'request')}), {work['predicted_ttft']:.1f} ms of its own"
        )
    now = (
        f"{counted(work['decode_request_num'], 'request')}, {counted(work['decode_token_num'], 'token')} now"
    )
    return f"{work['predicted_tpot']:.2f} ms per token with this request ({now})"


def _ranks(row: Mapping[str, Any]) -> list[SafeString]:
    if row["side"] != Side.PREFILL:
        return []
    held = [
        format_html(
            "rank {}: {} on the device, {} more on the host{}",
            rank["dp_rank"],
            counted(rank["device_hit_tokens"], "token"),
            f"{rank['host_only_hit_tokens']:,}",
            f" (not counted: {rank['ignored']})" if rank["ignored"] else "",
        )
        for rank in row["ranks"]
    ]
    return [*held, *(format_html("rank {}: no stream", rank) for rank in row["missing_ranks"])]
