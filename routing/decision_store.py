"""The database end of the decision log. Called on its writer thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from django.db import DataError, IntegrityError, connection, models, transaction

from routing.decision_log import Entry, Feedback, RefusedError, Written
from routing.decision_models import NAME_LENGTH, Decision, RecordedPrompt
from routing.records import DecisionRecord

LARGEST = 2**31 - 1
"""What a PositiveIntegerField takes everywhere."""
PRUNE_CHUNK = 5_000
"""Rows deleted in one statement, so that no reader waits long behind it."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept; whichever bound is met first applies."""

    days: float = 7.0
    rows: int = 200_000
    prompt_hours: float = 24.0
    prompt_rows: int = 1_000


@dataclass(slots=True)
class DecisionStore:
    """A `Sink` that writes rows."""

    replica: str = ""
    """Stands in every row, to tell replicas with one database apart."""
    retention: Retention = field(default_factory=Retention)

    def write(self, entries: Sequence[Entry]) -> None:
        """Insert the decisions, complete those that engines have reported on."""
        records = [entry.record for entry in entries if isinstance(entry, Written)]
        prompts = [e for e in entries if isinstance(e, Written) and e.prompt is not None]
        feedback = {e.decision_id: e.cached_tokens for e in entries if isinstance(e, Feedback)}
        rows = [self.row(record, feedback.pop(record.decision_id, None)) for record in records]
        try:
            with transaction.atomic():
                Decision.objects.bulk_create(rows)
                RecordedPrompt.objects.bulk_create(_prompt_row(written) for written in prompts)
                for decision_id, cached in feedback.items():
                    known = Decision.objects.filter(decision_id=decision_id)
                    known.update(cached_tokens=min(cached, LARGEST))
        except (DataError, IntegrityError) as error:
            raise RefusedError(str(error)) from error
        except Exception:
            connection.close()  # a broken connection must not be used for the next try
            raise

    def prune(self, now: float) -> None:
        """Delete what is too old or too much."""
        keep, at = self.retention, _wall(now)
        _delete(Decision.objects.filter(at__lt=at - timedelta(days=keep.days)))
        _delete(_beyond(Decision.objects.all(), keep.rows))
        _delete(RecordedPrompt.objects.filter(at__lt=at - timedelta(hours=keep.prompt_hours)))
        _delete(_beyond(RecordedPrompt.objects.all(), keep.prompt_rows))

    def close(self) -> None:
        connection.close()

    def row(self, record: DecisionRecord, reported: int | None = None) -> Decision:
        """A record as a row that is not saved. `reported`: what the engine found cached, when known."""
        prefill, decode = record.prefill or {}, record.decode or {}
        cached = record.cached_tokens if reported is None else reported
        return Decision(
            decision_id=record.decision_id,
            request_id=record.request_id,
            at=_wall(record.at),
            replica=self.replica[:NAME_LENGTH],
            policy=record.policy,
            outcome=record.outcome,
            input_tokens=record.input_tokens,
            prefill_instance=prefill.get("instance_name", ""),
            prefill_incarnation=prefill.get("incarnation_id") or "",
            prefill_score=prefill.get("score"),
            kv_hit_ratio=prefill.get("kv_hit_ratio"),
            queue_cost=prefill.get("queue_cost"),
            decode_instance=decode.get("instance_name", ""),
            decode_incarnation=decode.get("incarnation_id") or "",
            decode_score=decode.get("score"),
            predicted_hit_tokens=record.predicted_hit_tokens,
            cached_tokens=None if cached is None else min(cached, LARGEST),
            seconds=record.seconds,
            full=record.full,
            explanation=dict(record.explanation),
        )


def _prompt_row(written: Written) -> RecordedPrompt:
    record = written.record
    return RecordedPrompt(decision_id=record.decision_id, at=_wall(record.at), token_ids=written.prompt)


def _wall(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _beyond(rows: models.QuerySet, keep: int) -> models.QuerySet:
    """All but the newest `keep` rows."""
    last_kept = rows.order_by("-id").values_list("id", flat=True)[keep - 1 : keep].first()
    return rows.filter(id__lt=last_kept) if last_kept is not None else rows.none()


def _delete(rows: models.QuerySet) -> None:
    while True:
        ids = list(rows.order_by("id").values_list("id", flat=True)[:PRUNE_CHUNK])
        if ids:
            rows.model.objects.filter(id__in=ids).delete()
        if len(ids) < PRUNE_CHUNK:
            return
