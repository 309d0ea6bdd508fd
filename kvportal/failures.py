"""What a browser gets when a page fails."""

from __future__ import annotations

import sys

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.template import loader
from django.views.defaults import server_error


def page_failed(request: HttpRequest) -> HttpResponse:
    """Django's `handler500`, called while the failure is being handled. That the database is away is
    nothing to look for in the log, and the portal does its work meanwhile: a 503 says so."""
    if isinstance(sys.exc_info()[1], OperationalError | InterfaceError):
        text = loader.get_template("503_database.html").render()
        return HttpResponse(text, status=503, headers={"Retry-After": "5"})
    return server_error(request)
