"""Django app configuration of the composition root."""

from __future__ import annotations

from django.apps import AppConfig


class KvportalConfig(AppConfig):
    name = "kvportal"
    verbose_name = "Portal"
    default_auto_field = "django.db.models.BigAutoField"
