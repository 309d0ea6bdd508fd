"""Paths for machines, answered ahead of the middleware that is there for people."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponseBase
from django.urls import resolve

from streams.http import API_PREFIX

MACHINE_PATHS = frozenset({API_PREFIX.rstrip("/"), "/livez", "/readyz", "/metrics"})


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
        if not path.startswith(API_PREFIX) and path not in MACHINE_PATHS:
            return self._get_response(request)
        match = resolve(path)
        request.resolver_match = match
        view: Callable[..., HttpResponseBase] = match.func
        return view(request, *match.args, **match.kwargs)
