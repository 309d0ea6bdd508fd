"""The rows that remember decisions. For people: no decision reads them.

Instances are named by value, so that decisions outlive the instances they chose.
"""

from __future__ import annotations

from typing import Any

from django.db import models

from routing.policies.decision import Policy
from routing.records import NO_CANDIDATES, ROUTED

NAME_LENGTH = 256


class Decision(models.Model):
    """One routing decision of one replica, with its explanation."""

    decision_id = models.CharField("decision", max_length=32, unique=True)
    request_id = models.CharField("request", max_length=NAME_LENGTH)
    at = models.DateTimeField()
    replica = models.CharField(max_length=NAME_LENGTH, blank=True)
    policy = models.CharField(max_length=16, choices=[(str(policy), str(policy)) for policy in Policy])
    outcome = models.CharField(max_length=16, choices=[(ROUTED, "Routed"), (NO_CANDIDATES, "No candidates")])
    input_tokens = models.PositiveIntegerField("prompt tokens")
    prefill_instance = models.CharField("prefill", max_length=NAME_LENGTH, blank=True)
    prefill_incarnation = models.CharField(max_length=NAME_LENGTH, blank=True)
    prefill_score = models.FloatField("score", null=True, help_text="CAR only; the smallest wins.")
    kv_hit_ratio = models.FloatField(
        "hit ratio", null=True, help_text="CAR only; share of the prompt, 0 to 1."
    )
    queue_cost = models.FloatField(null=True, help_text="CAR only; in units of the longest queue, 0 to 1.")
    decode_instance = models.CharField(
        "decode", max_length=NAME_LENGTH, blank=True, help_text="Empty: the prefill instance decodes itself."
    )
    decode_incarnation = models.CharField(max_length=NAME_LENGTH, blank=True)
    decode_score = models.FloatField(null=True, help_text="CAR only; the smallest wins.")
    predicted_hit_tokens = models.PositiveIntegerField(
        "predicted hit", null=True, help_text="Tokens that the prefill instance should have cached."
    )
    cached_tokens = models.PositiveIntegerField(
        "reported hit",
        null=True,
        help_text="Tokens that its engine found cached, when the gateway reports it.",
    )
    seconds = models.FloatField(help_text="Time that the decision took.")
    full = models.BooleanField(
        "all candidates", help_text="Whether the explanation has all candidates or the best only."
    )
    explanation = models.JSONField()

    class Meta:
        ordering = ("-at", "-id")
        indexes = (
            models.Index(fields=["-at", "-id"], name="routing_decision_at"),
            models.Index(fields=["prefill_instance", "-at"], name="routing_decision_prefill"),
            models.Index(fields=["request_id"], name="routing_decision_request"),
        )
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.decision_id}: {self.prefill_instance or self.get_outcome_display()}"

    @property
    def prediction_error(self) -> int | None:
        """Predicted minus reported tokens; None while one of them is unknown."""
        if self.predicted_hit_tokens is None or self.cached_tokens is None:
            return None
        return self.predicted_hit_tokens - self.cached_tokens

    @property
    def excluded(self) -> list[dict[str, Any]]:
        """The instances that could not be chosen, as far as the explanation lists them."""
        return list(self.explanation.get("excluded", ()))


class RecordedPrompt(models.Model):
    """The token IDs of a decision. Written only when an operator turned recording on: they are prompts."""

    decision_id = models.CharField("decision", max_length=32, unique=True)
    at = models.DateTimeField(db_index=True)
    token_ids = models.BinaryField(help_text="Little-endian, 32 bits each.")

    class Meta:
        ordering = ("-at", "-id")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.decision_id
