"""The shapes of requests and answers, for the OpenAPI schema.

Nothing is parsed or rendered with them: a list of token IDs through a serializer costs fifty times what
a query does. That they say the truth is tested against real answers.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers

from streams.body import MAX_TOKEN_ID
from streams.status import StreamState


class ErrorDetailSerializer(serializers.Serializer):
    code = serializers.CharField(help_text="Stable; for programs.")
    message = serializers.CharField(help_text="A sentence that names the field and what is allowed.")


class ErrorSerializer(serializers.Serializer):
    error = ErrorDetailSerializer()


EVERYWHERE = (400, 401, 405, 413, 415, 503)
"""Failures that the guard may answer with before any endpoint sees the request."""


def failures(*statuses: int) -> dict[int, Any]:
    """All failures of an endpoint, as `responses` takes them: those that every endpoint has, and its own."""
    every = {
        400: "The body is no valid JSON, or a field is not what it must be; the message names it. While no "
        "token is set, also a `Host` header that names no server of this portal.",
        401: "`X-Internal-Token` is missing or not valid.",
        404: "There is no such thing.",
        405: "The path has other methods; `Allow` lists them.",
        408: "The body did not arrive in time.",
        409: "It conflicts with what the portal knows.",
        413: "The body or the list of token IDs is too long.",
        415: "The body is not declared as JSON, or is compressed.",
        503: "Not ready, the index is off, no candidates, or too many requests at once; `code` says which.",
    }
    return {
        status: OpenApiResponse(ErrorSerializer, every[status]) for status in sorted({*EVERYWHERE, *statuses})
    }


def token_ids() -> serializers.Field:
    """Token IDs, after the chat template was applied."""
    return serializers.ListField(
        child=serializers.IntegerField(min_value=0, max_value=MAX_TOKEN_ID),
        help_text="Token IDs with the chat template applied. The number of them is bounded.",
    )


class QueryRequestSerializer(serializers.Serializer):
    token_ids = token_ids()


class MatchSerializer(serializers.Serializer):
    instance_name = serializers.CharField()
    dp_rank = serializers.IntegerField(min_value=0)
    synchronized = serializers.BooleanField(help_text="False: all counts are 0, and `error` says why.")
    sequence = serializers.IntegerField(allow_null=True, help_text="Last message in the serving view.")
    device_hit_tokens = serializers.IntegerField(help_text="Tokens of the reusable prefix on Device.")
    host_only_hit_tokens = serializers.IntegerField(help_text="Those on Host alone.")
    reusable_prefix_tokens = serializers.IntegerField(help_text="The sum of both.")
    device_blocks = serializers.IntegerField(help_text="Blocks that the stream holds on Device.")
    host_blocks = serializers.IntegerField()
    error = serializers.CharField(allow_null=True, help_text="`code: sentence`.")
    block_size = serializers.IntegerField(help_text="Tokens per block.")
    incarnation_id = serializers.CharField(
        allow_null=True, help_text="The engine process that the blocks belong to; null for a static stream."
    )


class QueryAnswerSerializer(serializers.Serializer):
    matches = MatchSerializer(many=True, help_text="One per stream, in (instance, rank) order.")


class SnapshotSerializer(serializers.Serializer):
    at = serializers.FloatField(help_text="Seconds since the epoch.")
    watermark = serializers.IntegerField()
    size_bytes = serializers.IntegerField()
    seconds = serializers.FloatField(help_text="From the request until it was served.")
    count = serializers.IntegerField(help_text="Snapshots served since the stream was created.")


class StreamSerializer(serializers.Serializer):
    instance_name = serializers.CharField()
    dp_rank = serializers.IntegerField(min_value=0)
    state = serializers.ChoiceField(choices=[state.value for state in StreamState])
    synchronized = serializers.BooleanField()
    since = serializers.FloatField(help_text="Last change of state, seconds since the epoch.")
    error = serializers.CharField(allow_null=True, help_text="Why it does not serve: `code: sentence`.")
    warning = serializers.CharField(allow_null=True, help_text="What is wrong although it serves.")
    sequence = serializers.IntegerField(allow_null=True)
    device_blocks = serializers.IntegerField()
    host_blocks = serializers.IntegerField()
    mapped_blocks = serializers.IntegerField(help_text="Entries of the block-hash map.")
    last_event_at = serializers.FloatField(allow_null=True, help_text="Seconds since the epoch.")
    lag_seconds = serializers.FloatField(allow_null=True, help_text="Negative when clocks disagree.")
    last_snapshot = SnapshotSerializer(allow_null=True)
    counters = serializers.DictField(child=serializers.IntegerField())
    endpoint = serializers.CharField()
    replay_endpoint = serializers.CharField()
    topic = serializers.CharField(allow_blank=True)
    block_size = serializers.IntegerField()
    incarnation_id = serializers.CharField(allow_null=True)


class StreamsAnswerSerializer(serializers.Serializer):
    streams = StreamSerializer(many=True)


class ResyncRequestSerializer(serializers.Serializer):
    instance_name = serializers.CharField(required=False, allow_null=True, help_text="Absent: all.")
    dp_rank = serializers.IntegerField(required=False, allow_null=True, min_value=0, help_text="Absent: all.")
    drop = serializers.BooleanField(
        required=False, help_text="Stop serving what is there until the snapshot has come."
    )


class ResyncAnswerSerializer(serializers.Serializer):
    streams = serializers.IntegerField(help_text="How many streams were told.")
