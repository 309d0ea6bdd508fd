"""The internal API's OpenAPI schema, as an endpoint like any other: behind the same guard."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import orjson
from django.http import HttpRequest, HttpResponse
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema

from streams.api.base import EndpointView
from streams.http import Request, Response

TOKEN_SCHEME = "internal_token"  # noqa: S105 -- a name within the schema


@cache
def openapi() -> bytes:
    """The schema as JSON; made once, because the paths of a process do not change."""
    generator: Any = SchemaGenerator
    schema: dict[str, Any] = generator().get_schema(request=None, public=True)
    schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes[TOKEN_SCHEME] = {"type": "apiKey", "in": "header", "name": "X-Internal-Token"}
    schema["security"] = [{TOKEN_SCHEME: []}]
    for path in schema["paths"].values():
        for operation in path.values():
            # The generator knows the views only, which ask for nothing: the guard does, for all of them.
            operation.pop("security", None)
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2)


def schema_endpoint(request: Request) -> Response:
    """OpenAPI 3, in JSON."""
    return Response(200, openapi())


class SchemaView(EndpointView):
    endpoints: ClassVar = {"GET": "schema"}

    @extend_schema(exclude=True)
    def get(self, request: HttpRequest) -> HttpResponse:
        return self.answer(request)
