"""What people want to remember about streams. No query and no routing decision reads these tables.

The live state is in memory; a `Stream` row only gives the admin something to list, search and link
to. History names streams by value, so that it outlives the rows of streams that are gone.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import models

from streams import display
from streams.resync import OutcomeState, ResyncOrder, ResyncSource, targets_from_json, targets_to_json
from streams.spec import StreamId
from streams.status import StreamState

STATE_CHOICES = [(str(state), state.name.capitalize()) for state in StreamState]
SOURCE_CHOICES = [
    (str(ResyncSource.PAGE), "Operations page"),
    (str(ResyncSource.ADMIN), "Admin action"),
    (str(ResyncSource.API), "HTTP API"),
]
OUTCOME_CHOICES = [
    (str(OutcomeState.STARTED), "Started"),
    (str(OutcomeState.DONE), "Done"),
    (str(OutcomeState.INCOMPLETE), "Incomplete"),
    (str(OutcomeState.NO_MATCH), "No such stream"),
    (str(OutcomeState.FAILED), "Failed"),
]
NAME_LENGTH = 255


class Stream(models.Model):
    """A stream that some replica follows or has followed: one data-parallel rank of one instance."""

    instance_name = models.CharField("instance", max_length=NAME_LENGTH)
    dp_rank = models.PositiveIntegerField("rank")
    endpoint = models.CharField(max_length=NAME_LENGTH, help_text="The engine's live events (XPUB).")
    replay_endpoint = models.CharField(max_length=NAME_LENGTH, help_text="The engine's snapshots (ROUTER).")
    first_seen = models.DateTimeField()
    last_seen = models.DateTimeField(help_text="When a replica last followed it; refreshed once a minute.")

    class Meta:
        ordering = ("instance_name", "dp_rank")
        constraints = (
            models.UniqueConstraint(fields=["instance_name", "dp_rank"], name="streams_stream_identity"),
        )
        default_permissions = ("view",)
        permissions = (("resync_stream", "Can force a resync of streams"),)

    def __str__(self) -> str:
        return str(self.stream_id)

    @property
    def stream_id(self) -> StreamId:
        return StreamId(self.instance_name, self.dp_rank)


class StreamStateChange(models.Model):
    """One step in a stream's life as one replica saw it, with the reason."""

    at = models.DateTimeField()
    replica = models.CharField(max_length=NAME_LENGTH)
    instance_name = models.CharField("instance", max_length=NAME_LENGTH)
    dp_rank = models.PositiveIntegerField("rank")
    old_state = models.CharField("from", max_length=20, choices=STATE_CHOICES)
    new_state = models.CharField("to", max_length=20, choices=STATE_CHOICES)
    code = models.CharField(max_length=64, blank=True)
    sentence = models.TextField("reason", blank=True)
    detail = models.TextField(blank=True)

    class Meta:
        ordering = ("-at", "-id")
        indexes = (
            models.Index(fields=["-at", "-id"], name="streams_change_at"),
            models.Index(fields=["instance_name", "dp_rank", "-at"], name="streams_change_stream"),
        )
        default_permissions = ("view",)
        verbose_name = "state change"

    def __str__(self) -> str:
        return f"{StreamId(self.instance_name, self.dp_rank)}: {self.old_state} → {self.new_state}"

    def badge(self) -> str:
        """The new state, for templates."""
        return display.badge(self.new_state)


class ResyncRequest(models.Model):
    """The audit of a resync: who, when, which streams, how. One row for each order, from anywhere."""

    key = models.CharField(max_length=32, unique=True, editable=False)
    at = models.DateTimeField("ordered at")
    actor = models.CharField("ordered by", max_length=NAME_LENGTH)
    source = models.CharField(max_length=10, choices=SOURCE_CHOICES)
    targets = models.JSONField(help_text="Instances and ranks; null stands for all.")
    scope = models.TextField("streams")
    """The targets in words."""
    drop = models.BooleanField("dropped the index first")

    class Meta:
        ordering = ("-at", "-id")
        indexes = (models.Index(fields=["-at", "-id"], name="streams_resync_at"),)
        default_permissions = ("view",)
        verbose_name = "resync"

    def __str__(self) -> str:
        return f"{self.scope} by {self.actor}"

    @classmethod
    def record(cls, order: ResyncOrder) -> ResyncRequest:
        """The row of an order; the same row however often it is recorded."""
        row, _ = cls.objects.get_or_create(
            key=order.key,
            defaults={
                "at": datetime.fromtimestamp(order.at, UTC),
                "actor": order.actor[:NAME_LENGTH],
                "source": str(order.source),
                "targets": targets_to_json(order.targets),
                "scope": order.scope,
                "drop": order.drop,
            },
        )
        return row

    @property
    def order(self) -> ResyncOrder:
        return ResyncOrder(
            key=self.key,
            actor=self.actor,
            source=ResyncSource(self.source),
            at=self.at.timestamp(),
            targets=targets_from_json(self.targets),
            drop=self.drop,
        )


class ResyncResult(models.Model):
    """What became of a resync on one replica."""

    request = models.ForeignKey(ResyncRequest, on_delete=models.CASCADE, related_name="results")
    replica = models.CharField(max_length=NAME_LENGTH)
    at = models.DateTimeField()
    state = models.CharField("outcome", max_length=12, choices=OUTCOME_CHOICES)
    reached = models.PositiveIntegerField("streams reached")
    settled = models.PositiveIntegerField("with a new snapshot")
    detail = models.TextField(blank=True)

    class Meta:
        ordering = ("replica",)
        constraints = (
            models.UniqueConstraint(fields=["request", "replica"], name="streams_result_once_per_replica"),
        )
        default_permissions = ("view",)
        verbose_name = "outcome"

    def __str__(self) -> str:
        return f"{self.replica}: {self.get_state_display()}"
