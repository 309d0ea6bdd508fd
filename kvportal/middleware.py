"""Paths for machines, answered ahead of the middleware that is there for people."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from django.http import HttpRequest, HttpResponseBase
from django.urls import resolve

API_PATH: Final = r"(?:/+)?v1(?:/|\Z)"
"""What every path of an API begins with. A client that joins a base URL and a path carelessly sends
several slashes; it expects JSON all the same."""
MACHINE_PATHS = frozenset({"/livez", "/readyz", "/metrics"})

_is_api_path = re.compile(API_PATH).match


class MachinePathsMiddleware:
    """Calls the view of an API or health path at once. Must come first.

    Engines, gateways and probes send no cookie, know no CSRF token and may address the process by any
    name, so sessions, CSRF, redirects and the Host check are not for them; nor may a cookie of somebody
    who is signed in to the admin mean anything here.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        path = request.path_info
        if path not in MACHINE_PATHS and not _is_api_path(path):
            return self._get_response(request)
        match = resolve(path)
        request.resolver_match = match
        view: Callable[..., HttpResponseBase] = match.func
        return view(request, *match.args, **match.kwargs)
