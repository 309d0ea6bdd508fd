"""The routing lab's page: recorded decisions under other weights, and how far predictions can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from routing.console import console
from routing.decision_models import Decision
from routing.lab import Effect, Kept, Rejudged, Step, effect, per_instance, rejudge_all, sweep
from routing.policies.decision import Policy, Settings
from routing.prediction_errors import InstanceErrors
from routing.records import ROUTED
from streams.wording import counted

COUNTS = (50, 200, 1000)
"""How many decisions may be asked for; more take seconds."""
DEFAULT_COUNT = 200
SWEPT = 100
"""Decisions, the newest, that every lambda is tried on."""
SHOWN_MOVED = 50
SHOWN_INSTANCES = 20
SHARE = "a number from 0 to 1"
SPARK_WIDTH, SPARK_HEIGHT = 160, 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What the form asks for."""

    settings: Settings
    newest: int
    errors: tuple[str, ...] = ()
    """Sentences about fields that were not understood; they keep their default."""


def read_form(values: Mapping[str, str], inforce: Settings) -> Asked:
    """The weights in the form's fields; those in force where a field is missing."""
    errors: list[str] = []

    def share(field: str, label: str, default: float) -> float:
        text = values.get(field, "").strip()
        try:
            number = float(text) if text else default
        except ValueError:
            number = -1.0
        if 0.0 <= number <= 1.0:
            return number
        errors.append(f"{label} is “{text[:40]}”; it must be {SHARE}.")
        return default

    weight = share("lambda", "Lambda", inforce.car_prefill_lambda)
    host = share("host_weight", "Host weight", inforce.car_host_hit_weight)
    newest = values.get("newest", "")
    if newest and newest not in map(str, COUNTS):
        errors.append(f"The number of decisions must be one of {', '.join(map(str, COUNTS))}.")
        newest = ""
    settings = Settings(policy=Policy.CAR, car_prefill_lambda=weight, car_host_hit_weight=host)
    return Asked(settings, int(newest or DEFAULT_COUNT), tuple(errors))


def kept_decisions(most: int) -> list[Kept]:
    """The newest routed decisions with a full explanation: the database's, and those of this process that
    are not written yet. Newest first."""
    found: dict[str, Kept] = {}
    running = console()
    for record in running.decisions.recent() if running else ():
        if record.full and record.outcome == ROUTED:
            found[record.decision_id] = Kept(record.decision_id, record.at, record.explanation)
    rows = Decision.objects.filter(full=True, outcome=ROUTED).order_by("-at", "-id")
    for decision_id, at, explanation in rows.values_list("decision_id", "at", "explanation")[:most]:
        found.setdefault(decision_id, Kept(decision_id, at.timestamp(), explanation))
    return sorted(found.values(), key=lambda one: -one.at)[:most]


def lab_view(request: HttpRequest, context: dict[str, Any]) -> TemplateResponse:
    """The page; `context`: what every page of the admin has."""
    running = console()
    inforce = running.selector.settings if running else Settings(policy=Policy.CAR)
    asked = read_form(request.GET.dict(), inforce)
    kept = kept_decisions(asked.newest)
    context |= {
        "title": "Routing lab",
        "asked": asked,
        "counts": COUNTS,
        "inforce": inforce if running else None,
        "serving": running is not None,
        "kept_num": len(kept),
        "errors": [error_row(row) for row in running.selector.errors.read()] if running else [],
    }
    if kept:
        context |= _results(kept, asked, inforce)
    return TemplateResponse(request, "admin/routing/decision/lab.html", context)


def _results(kept: list[Kept], asked: Asked, inforce: Settings) -> dict[str, Any]:
    rejudged = rejudge_all(kept, asked.settings)
    moved = [one for one in rejudged if one.moved]
    before, after = effect(rejudged, after=False), effect(rejudged, after=True)
    return {
        "judged": len(rejudged),
        "unscored": len(kept) - len(rejudged),
        "moved": len(moved),
        "decode_moved": sum(one.decode_moved for one in rejudged),
        "since": _wall(kept[-1].at),
        "until": _wall(kept[0].at),
        "policies": sorted({one.explanation["policy"] for one in kept}),
        "before": before,
        "after": after,
        "changes": _changes(before, after),
        "steps": _steps(sweep(kept[:SWEPT], asked.settings), asked, inforce),
        "swept": min(len(kept), SWEPT),
        "instances": [_instance_row(*row) for row in per_instance(rejudged)[:SHOWN_INSTANCES]],
        "instances_more": max(0, len(per_instance(rejudged)) - SHOWN_INSTANCES),
        "moved_rows": [_moved_row(one) for one in moved[:SHOWN_MOVED]],
        "moved_more": max(0, len(moved) - SHOWN_MOVED),
    }


def _wall(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _changes(before: Effect, after: Effect) -> list[dict[str, str]]:
    """What the weights do, line by line."""
    points = (after.hit_share - before.hit_share) * 100
    rows = [
        (
            "Prompt tokens found in a cache",
            percent(before.hit_share),
            percent(after.hit_share),
            signed(points, ".1f", "points"),
        ),
        ("on the device", *_counts(before.device_tokens, after.device_tokens)),
        ("in host memory alone", *_counts(before.host_tokens, after.host_tokens)),
        (
            "Mean queue at the prefill instance",
            f"{before.mean_waiting:.2f}",
            f"{after.mean_waiting:.2f}",
            signed(after.mean_waiting - before.mean_waiting, ".2f", "requests"),
        ),
    ]
    return [
        {"name": name, "before": old, "after": new, "change": "unchanged" if old == new else change}
        for name, old, new, change in rows
    ]


def signed(number: float, how: str, unit: str = "") -> str:
    """With its sign, and a minus as wide as a plus."""
    return f"{number:+{how}} {unit}".strip().replace("-", "−")


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _counts(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", signed(after - before, ",", "tokens")


def _steps(steps: list[Step], asked: Asked, inforce: Settings) -> list[dict[str, Any]]:
    longest = max((step.effect.mean_waiting for step in steps), default=0.0) or 1.0
    host = asked.settings.car_host_hit_weight
    return [
        {
            "weight": f"{step.car_prefill_lambda:g}",
            "query": urlencode(
                {
                    "lambda": f"{step.car_prefill_lambda:g}",
                    "host_weight": f"{host:g}",
                    "newest": f"{asked.newest}",
                }
            ),
            "asked": step.car_prefill_lambda == asked.settings.car_prefill_lambda,
            "inforce": inforce.policy is Policy.CAR and step.car_prefill_lambda == inforce.car_prefill_lambda,
            "moved": step.moved,
            "hit_share": percent(step.effect.hit_share),
            "hit_width": round(step.effect.hit_share * 100),
            "waiting": f"{step.effect.mean_waiting:.2f}",
            "waiting_width": round(step.effect.mean_waiting / longest * 100),
        }
        for step in steps
    ]


def _instance_row(name: str, before: int, after: int) -> dict[str, Any]:
    change = "unchanged" if before == after else signed(after - before, ",")
    return {"name": name, "before": before, "after": after, "change": change}


def _moved_row(one: Rejudged) -> dict[str, Any]:
    tokens = one.kept.explanation["input_tokens"]
    return {
        "id": one.kept.decision_id,
        "at": _wall(one.kept.at),
        "tokens": tokens,
        "before": one.before,
        "after": one.after,
        "decode_moved": one.decode_moved,
    }


# ---- how far predictions can be trusted


def error_row(errors: InstanceErrors) -> dict[str, Any]:
    """One instance's prediction errors in numbers, with a small chart of the latest."""
    mean = errors.error_sum / errors.count
    if abs(mean) < 0.5:
        words = "as predicted, on average"
    else:
        words = "found less than predicted" if mean > 0 else "found more than predicted"
    return {
        "name": errors.instance_name,
        "count": errors.count,
        "mean": signed(mean, ",.0f") if abs(mean) >= 0.5 else "0",
        "absolute": f"{errors.absolute_sum / errors.count:,.0f}",
        "words": words,
        "spark": _spark([comparison.error_tokens for comparison in errors.recent]),
    }


def _spark(errors: list[int]) -> SafeString:
    """Bars above and below a line at zero, oldest first. The numbers are beside it and in its label."""
    extent = max(map(abs, errors)) or 1
    middle, step = SPARK_HEIGHT / 2, SPARK_WIDTH / max(len(errors), 40)
    bars = "".join(_bars(errors, extent, middle, step))
    return format_html(
        '<svg class="lab-spark" width="{}" height="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">'
        '<path class="lab-spark-zero" d="M0 {}H{}"/><path class="lab-spark-bars" d="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT,
        SPARK_WIDTH,
        SPARK_HEIGHT,
        f"Last {counted(len(errors), 'error')}, from {min(errors):+,} to {max(errors):+,} tokens",
        middle,
        SPARK_WIDTH,
        bars,
    )


def _bars(errors: Iterable[int], extent: int, middle: float, step: float) -> Iterable[str]:
    for place, error in enumerate(errors):
        if error:
            height = error / extent * (middle - 1)
            yield f"M{place * step + step / 2:.1f} {middle:g}v{-height:.1f}"
