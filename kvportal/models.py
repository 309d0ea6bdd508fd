"""What replicas tell each other through the database: one row each, rewritten every few seconds."""

from __future__ import annotations

from django.db import models


class Replica(models.Model):
    """One portal process and its view of the streams; a row that is no longer rewritten is gone."""

    name = models.CharField(max_length=255, unique=True)
    started_at = models.DateTimeField("started")
    heartbeat_at = models.DateTimeField("last heartbeat")
    state = models.JSONField(help_text="The replica's own view: streams, counters, troubles.")

    class Meta:
        ordering = ("name",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name
