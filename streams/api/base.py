"""The Django shell around a guarded endpoint (the other one is `kvportal.fastpath`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from rest_framework.views import APIView

from streams.http import NOT_FOUND, Head, Response, announced_length, endpoint


def answer(
    request: HttpRequest, name: str, *, allowed: tuple[str, ...], params: Mapping[str, str] | None = None
) -> HttpResponse:
    """Has the installed endpoint of that name answer. `allowed`: the methods that the path has."""
    admission = endpoint(name).admit(_head(request, allowed, params or {}))
    if isinstance(admission, Response):
        response = admission
    else:
        with admission:
            response = admission.answer(request.read(admission.max_body_bytes + 1))
    return _http_response(response, b"" if request.method == "HEAD" else response.body)


class EndpointView(APIView):
    """A path of the internal API. `endpoints` says which endpoint stands behind each method.

    A subclass has one handler per method, which carries the schema and calls `answer`. DRF describes;
    its parsers, negotiation and permissions stay out, because the guard has decided all of that for both
    shells alike.
    """

    endpoints: ClassVar[Mapping[str, str]]

    def dispatch(self, request: HttpRequest, *args: str, **kwargs: str) -> HttpResponse:
        """A method that does not exist goes to any handler: the guard looks at the token first."""
        method = request.method or ""
        known = method if method in self.endpoints else next(iter(self.endpoints))
        return getattr(self, known.lower())(request, **kwargs)

    def answer(self, request: HttpRequest, **params: str) -> HttpResponse:
        allowed = tuple(self.endpoints)
        name = self.endpoints.get(request.method or "", self.endpoints[allowed[0]])
        return answer(request, name, allowed=allowed, params=params)


@csrf_exempt
def not_found(request: HttpRequest) -> HttpResponse:
    """For every path of the API that nothing else answers."""
    return answer(request, NOT_FOUND, allowed=())


def _head(request: HttpRequest, allowed: tuple[str, ...], params: Mapping[str, str]) -> Head:
    meta = request.META
    return Head(
        method=request.method or "",
        path=request.path_info,
        allowed=allowed,
        params=params,
        token=meta.get("HTTP_X_INTERNAL_TOKEN", "").encode("latin-1", "replace"),
        content_type=meta.get("CONTENT_TYPE", ""),
        content_encoding=meta.get("HTTP_CONTENT_ENCODING", ""),
        content_length=announced_length(meta.get("CONTENT_LENGTH") or ""),
        host=meta.get("HTTP_HOST", ""),
    )


def _http_response(response: Response, body: bytes) -> HttpResponse:
    answered = HttpResponse(body, status=response.status, content_type=response.content_type)
    # Django would log a line for each answer from 400 on: a gateway with a wrong token could fill a disk
    # with them. They are counted in the metrics, and what failed unexpectedly was logged by the guard.
    answered._has_been_logged = True  # type: ignore[attr-defined]
    if not response.body:
        del answered["Content-Type"]
    if response.status != 204:
        answered["Content-Length"] = str(len(response.body))  # to HEAD as well: of what GET would get
    for key, value in response.headers.items():
        answered[key] = value
    return answered
