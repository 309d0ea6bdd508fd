"""The portal's URLs: pages for people, the internal API, and what probes and scrapers ask for."""

from __future__ import annotations

from pathlib import Path

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path, re_path
from django.views.decorators.cache import cache_control
from django.views.generic import RedirectView

from kvportal.middleware import API_PATH
from kvportal.schema import SchemaView
from streams.api.base import answer, not_found

LOGO = Path(__file__).parent / "static" / "kvportal" / "logo.svg"


def livez(request: HttpRequest) -> HttpResponse:
    return answer(request, "livez", allowed=("GET", "HEAD"))


def readyz(request: HttpRequest) -> HttpResponse:
    return answer(request, "readyz", allowed=("GET", "HEAD"))


def metrics(request: HttpRequest) -> HttpResponse:
    return answer(request, "metrics", allowed=("GET", "HEAD"))


@cache_control(max_age=86_400, public=True)
def favicon(request: HttpRequest) -> HttpResponse:
    """What browsers ask for beside any answer that is no page; the pages themselves link the file."""
    return HttpResponse(LOGO.read_bytes(), content_type="image/svg+xml")


handler500 = "kvportal.failures.page_failed"
urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("favicon.ico", favicon),
    path("admin/", admin.site.urls),
    path("v1/internal/", include("streams.api.urls")),
    path("v1/internal/", include("routing.api.urls")),
    path("v1/internal/schema", SchemaView.as_view()),
    re_path(rf"^{API_PATH}", not_found),
    path("livez", livez),
    path("readyz", readyz),
    path("metrics", metrics),
]
