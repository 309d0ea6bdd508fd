"""Django app configuration of the streams app."""

from __future__ import annotations

from django.apps import AppConfig


class StreamsConfig(AppConfig):
    name = "streams"
    verbose_name = "KV event streams"
    default_auto_field = "django.db.models.BigAutoField"
