"""Rows of the routing app: instances entered by people, and the decisions that were made.

No decision reads them. Entered instances are read at the start and when they change; what lives is
in memory.
"""

from __future__ import annotations

import time

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from routing.decision_models import Decision, RecordedPrompt
from routing.instances.embedded import MAX_TTL_SECONDS, Entry
from routing.instances.model import XLLM, Registration, Role
from routing.instances.registration import (
    MAX_INCARNATION_LENGTH,
    MAX_NAME_LENGTH,
    InvalidInputError,
    check_name,
)
from streams.discovery import split_address

__all__ = ["Decision", "Instance", "RecordedPrompt", "load_entered"]

MAX_RANKS = 4096
MIN_TTL_SECONDS = 1.0


def validate_name(value: str) -> None:
    """An address that can be connected to."""
    try:
        check_name(value)
        split_address(value)
    except (InvalidInputError, ValueError) as error:
        raise ValidationError(str(error)) from None


def now_ms() -> int:
    return int(time.time() * 1000)


class Instance(models.Model):
    """An instance that somebody entered, for the embedded registry. Those that register by themselves
    have no row."""

    name = models.CharField(
        "address",
        max_length=MAX_NAME_LENGTH,
        unique=True,
        validators=[validate_name],
        help_text="The engine's HTTP address, host:port; IPv6 in brackets.",
    )
    enabled = models.BooleanField(default=True, help_text="Off: as if it were not listed.")
    role = models.CharField(
        max_length=10, choices=[(str(role), str(role)) for role in Role], default=str(Role.DEFAULT)
    )
    dp_size = models.PositiveIntegerField(
        "data-parallel ranks", default=1, validators=[MinValueValidator(1), MaxValueValidator(MAX_RANKS)]
    )
    incarnation_id = models.CharField(
        "incarnation",
        max_length=MAX_INCARNATION_LENGTH,
        blank=True,
        help_text="Only if the engine sends one with its heartbeats, and then the same one.",
    )
    backend = models.CharField(
        max_length=64, default=XLLM, help_text=f"Only {XLLM} instances take part in the index."
    )
    ttl_s = models.FloatField(
        "heartbeat expected every (s)",
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_TTL_SECONDS), MaxValueValidator(MAX_TTL_SECONDS)],
        help_text="Without a heartbeat for so long it is asked whether it lives. Empty: it is never missed.",
    )
    note = models.TextField(blank=True)
    registered_ms = models.PositiveBigIntegerField(
        default=now_ms,
        editable=False,
        help_text="Stands for the incarnation that nobody knows (milliseconds since the epoch).",
    )

    class Meta:
        ordering = ("name",)
        verbose_name = "instance"

    def __str__(self) -> str:
        return self.name

    @property
    def entry(self) -> Entry:
        """What the embedded registry takes."""
        registration = Registration(
            name=self.name,
            role=Role(self.role),
            incarnation_id=self.incarnation_id or None,
            register_ts_ms=self.registered_ms,
            dp_size=self.dp_size,
            backend=self.backend.lower(),
        )
        return Entry(registration, self.ttl_s)


def load_entered() -> list[Entry]:
    """The instances to be registered now. One query."""
    return [row.entry for row in Instance.objects.filter(enabled=True)]
