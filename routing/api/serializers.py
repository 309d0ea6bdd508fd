"""The shapes of routing's and the instances' requests and answers, for the OpenAPI schema only."""

from __future__ import annotations

from rest_framework import serializers

from streams.api.serializers import token_ids

ACTIONS = ("SCHEDULE", "FINISH_PREFILL", "GENERATE", "FINISH_DECODE", "CANCEL")
CODES = ("port_conflict", "port_overflow", "max_streams", "bad_address", "backend", "role")


class SelectRequestSerializer(serializers.Serializer):
    token_ids = token_ids()
    request_id = serializers.CharField(
        required=False, allow_null=True, help_text="Yours; one is made up when absent."
    )
    explain = serializers.BooleanField(required=False, help_text="Adds `candidates` to the answer.")


class ChoiceSerializer(serializers.Serializer):
    instance_name = serializers.CharField()
    incarnation_id = serializers.CharField(allow_null=True)
    score = serializers.FloatField(allow_null=True, help_text="Smallest wins; null outside CAR.")


class PrefillChoiceSerializer(ChoiceSerializer):
    kv_hit_ratio = serializers.FloatField(allow_null=True, help_text="0 to 1; null outside CAR.")
    queue_cost = serializers.FloatField(allow_null=True, help_text="0 to 1; null outside CAR.")


class SelectAnswerSerializer(serializers.Serializer):
    decision_id = serializers.CharField()
    request_id = serializers.CharField()
    policy = serializers.CharField()
    prefill = PrefillChoiceSerializer()
    decode = ChoiceSerializer(allow_null=True, help_text="Null: the prefill instance decodes too.")
    predicted_hit_tokens = serializers.IntegerField(
        allow_null=True, help_text="Tokens that the prefill instance should have cached; null: nobody knows."
    )
    candidates = serializers.JSONField(required=False, help_text="With `explain`: inputs and scores.")
    excluded = serializers.JSONField(required=False, help_text="With `explain`: who was left out, and why.")
    explanation = serializers.JSONField(required=False, help_text="With `explain`: settings and outcome.")


class ProgressRequestSerializer(serializers.Serializer):
    action = serializers.ChoiceField(choices=ACTIONS)
    num_generated_tokens = serializers.IntegerField(
        required=False, allow_null=True, min_value=0, help_text="With GENERATE: tokens so far, in all."
    )
    cached_tokens = serializers.IntegerField(
        required=False, allow_null=True, min_value=0, help_text="As the engine's answer says."
    )


class LoadMetricsSerializer(serializers.Serializer):
    waiting_requests_num = serializers.IntegerField()
    gpu_cache_usage_perc = serializers.FloatField(help_text="0 to 1.")


class LatencyMetricsSerializer(serializers.Serializer):
    recent_max_ttft = serializers.FloatField(required=False)
    recent_max_tbt = serializers.FloatField(required=False)


class HeartbeatRequestSerializer(serializers.Serializer):
    name = serializers.CharField()
    incarnation_id = serializers.CharField()
    load_metrics = LoadMetricsSerializer()
    latency_metrics = LatencyMetricsSerializer(required=False)


class RegistrationRequestSerializer(serializers.Serializer):
    """What xLLM writes to etcd, and a lease. Unknown fields are ignored."""

    name = serializers.CharField(required=False)
    type = serializers.IntegerField(help_text="0 DEFAULT, 1 PREFILL, 2 DECODE, 3 MIX.")
    incarnation_id = serializers.CharField(required=False)
    register_ts_ms = serializers.IntegerField(required=False)
    dp_size = serializers.IntegerField(required=False, min_value=1)
    ttl_s = serializers.FloatField(help_text="Seconds until the lease ends unless a heartbeat renews it.")


class DeletionRequestSerializer(serializers.Serializer):
    incarnation_id = serializers.CharField(
        required=False, allow_null=True, help_text="Only this life; another one makes it a 409."
    )


class ExclusionSerializer(serializers.Serializer):
    code = serializers.ChoiceField(choices=CODES)
    message = serializers.CharField()


class LoadSerializer(serializers.Serializer):
    waiting_requests_num = serializers.IntegerField()
    gpu_cache_usage_perc = serializers.FloatField(allow_null=True)
    valid = serializers.BooleanField(help_text="Whether CAR may use it.")
    source = serializers.ChoiceField(choices=["heartbeat", "etcd"])
    age_s = serializers.FloatField()


class LatencySerializer(serializers.Serializer):
    recent_max_ttft = serializers.FloatField(allow_null=True)
    recent_max_tbt = serializers.FloatField(allow_null=True)


class InstanceSerializer(serializers.Serializer):
    name = serializers.CharField()
    state = serializers.ChoiceField(choices=["ACTIVE", "LEASE_LOST", "SUSPECT"])
    since = serializers.FloatField(help_text="Last change of state, seconds since the epoch.")
    reason = serializers.CharField(help_text="Why it is in this state.")
    role = serializers.ChoiceField(choices=["DEFAULT", "PREFILL", "DECODE", "MIX"])
    current_role = serializers.ChoiceField(choices=["DEFAULT", "PREFILL", "DECODE"])
    incarnation_id = serializers.CharField(allow_null=True)
    register_ts_ms = serializers.IntegerField(allow_null=True)
    dp_size = serializers.IntegerField()
    backend = serializers.CharField()
    registered = serializers.BooleanField(help_text="Whether its key or lease still stands.")
    heartbeat_at = serializers.FloatField(allow_null=True, help_text="Seconds since the epoch.")
    load = LoadSerializer(allow_null=True, help_text="Null before the first report.")
    latency = LatencySerializer(allow_null=True)
    excluded = ExclusionSerializer(allow_null=True, help_text="Why it has no streams.")


class InstancesAnswerSerializer(serializers.Serializer):
    instances = InstanceSerializer(many=True, help_text="In name order.")
    source = serializers.JSONField(help_text="How the source of instances does, and the keys it skips.")
