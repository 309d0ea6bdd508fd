"""What the log leaves out."""

from __future__ import annotations

import logging


class NoTracebackOfRefusals(logging.Filter):
    """Django logs how it came to refuse a request, in forty lines. That a page is not for somebody, or does
    not exist, is no fault of ours: one line says it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "django.request" and getattr(record, "status_code", 500) < 500:
            record.exc_info = record.exc_text = None
        return True
