"""The routing app's part of the internal API: decisions, and the instances that they choose from."""

from __future__ import annotations

from typing import ClassVar

from django.http import HttpRequest, HttpResponse
from drf_spectacular.utils import OpenApiResponse, extend_schema

from routing.api import serializers
from streams.api.base import EndpointView
from streams.api.serializers import failures

DONE = {204: OpenApiResponse(description="Done.")}


class SelectView(EndpointView):
    endpoints: ClassVar = {"POST": "select"}

    @extend_schema(
        operation_id="select",
        summary="Which instances should serve a prompt",
        request=serializers.SelectRequestSerializer,
        responses={200: serializers.SelectAnswerSerializer, **failures(408, 409)},
        tags=["routing"],
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """The request counts as scheduled from then on; report what becomes of it."""
        return self.answer(request)


class ProgressView(EndpointView):
    endpoints: ClassVar = {"POST": "progress"}

    @extend_schema(
        operation_id="report_progress",
        summary="What became of a routed request",
        request=serializers.ProgressRequestSerializer,
        responses={**DONE, **failures(404, 408)},
        tags=["routing"],
    )
    def post(self, request: HttpRequest, request_id: str) -> HttpResponse:
        """Must reach the replica that decided. Repeating an action changes nothing."""
        return self.answer(request, request_id=request_id)


class HeartbeatView(EndpointView):
    endpoints: ClassVar = {"POST": "heartbeat"}

    @extend_schema(
        operation_id="heartbeat",
        summary="An instance lives, and this is its load",
        request=serializers.HeartbeatRequestSerializer,
        responses={**DONE, **failures(404, 408, 409)},
        tags=["instances"],
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Used at once; also renews the lease in the embedded registry."""
        return self.answer(request)


class InstancesView(EndpointView):
    endpoints: ClassVar = {"GET": "instances"}

    @extend_schema(
        operation_id="list_instances",
        summary="All registered instances",
        responses={200: serializers.InstancesAnswerSerializer, **failures()},
        tags=["instances"],
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """Also answers while the portal is not ready."""
        return self.answer(request)


class InstanceView(EndpointView):
    endpoints: ClassVar = {"PUT": "instance_put", "DELETE": "instance_delete"}

    @extend_schema(
        operation_id="register_instance",
        summary="Register an instance",
        request=serializers.RegistrationRequestSerializer,
        responses={**DONE, **failures(409)},
        tags=["instances"],
    )
    def put(self, request: HttpRequest, name: str) -> HttpResponse:
        """Embedded registry only; with etcd, engines register there."""
        return self.answer(request, name=name)

    @extend_schema(
        operation_id="deregister_instance",
        summary="Take an instance out",
        request=serializers.DeletionRequestSerializer,
        responses={**DONE, **failures(404, 409)},
        tags=["instances"],
    )
    def delete(self, request: HttpRequest, name: str) -> HttpResponse:
        """Embedded registry only."""
        return self.answer(request, name=name)
