"""The streams app's part of the internal API."""

from __future__ import annotations

from typing import ClassVar

from django.http import HttpRequest, HttpResponse
from drf_spectacular.utils import extend_schema

from streams.api import serializers
from streams.api.base import EndpointView
from streams.api.serializers import failures


class QueryView(EndpointView):
    endpoints: ClassVar = {"POST": "query"}

    @extend_schema(
        operation_id="query",
        summary="How much of a prompt each stream holds",
        request=serializers.QueryRequestSerializer,
        responses={200: serializers.QueryAnswerSerializer, **failures(408)},
        tags=["streams"],
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Counts whole blocks only, from the start of the prompt to the first block that the stream holds
        in neither tier. Empty `token_ids` shows the state of all streams."""
        return self.answer(request)


class StreamsView(EndpointView):
    endpoints: ClassVar = {"GET": "streams"}

    @extend_schema(
        operation_id="list_streams",
        summary="All live streams",
        responses={200: serializers.StreamsAnswerSerializer, **failures()},
        tags=["streams"],
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """State, reason, counters and last snapshot. Also answers while the portal is not ready."""
        return self.answer(request)


class ResyncView(EndpointView):
    endpoints: ClassVar = {"POST": "resync"}

    @extend_schema(
        operation_id="resync",
        summary="Fetch new snapshots",
        request=serializers.ResyncRequestSerializer,
        responses={202: serializers.ResyncAnswerSerializer, **failures(404)},
        tags=["streams"],
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Of all streams, of an instance's, or of one rank. Other keys are refused."""
        return self.answer(request)
