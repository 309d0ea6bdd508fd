"""From the one `Config` to the settings of each part. Pure."""

from __future__ import annotations

from kvportal.config.model import Config
from kvportal.health import WarmUp
from kvportal.records import Retention as HistoryRetention
from routing.decision_store import Retention as DecisionRetention
from routing.instances.core import HealthSettings
from routing.instances.etcd import EtcdSettings
from routing.instances.probe import ProbeSettings
from routing.policies.decision import Policy
from routing.policies.decision import Settings as RoutingSettings


def etcd_settings(config: Config) -> EtcdSettings:
    return EtcdSettings(
        endpoints=config.etcd_addrs,
        namespace=config.etcd_namespace,
        username=config.etcd_username,
        password=config.etcd_password,
        ca=config.etcd_ca,
        cert=config.etcd_cert,
        key=config.etcd_key,
    )


def health_settings(config: Config) -> HealthSettings:
    return HealthSettings(
        lease_lost_heartbeat_timeout=config.lease_lost_heartbeat_timeout_ms / 1000,
        suspect_timeout=config.detect_disconnected_instance_interval,
    )


def probe_settings(config: Config) -> ProbeSettings:
    return ProbeSettings(
        timeout=config.instance_delete_probe_timeout_ms / 1000,
        attempts=config.instance_delete_probe_attempts,
    )


def routing_settings(config: Config) -> RoutingSettings:
    return RoutingSettings(
        policy=Policy(config.load_balance_policy),
        car_prefill_lambda=config.car_prefill_lambda,
        car_host_hit_weight=config.car_host_hit_weight,
        target_ttft=config.target_ttft,
        target_tpot=config.target_tpot,
    )


def decision_retention(config: Config) -> DecisionRetention:
    return DecisionRetention(
        days=config.decision_retention_days,
        rows=config.decision_retention_rows,
        prompt_hours=config.record_prompts_hours,
        prompt_rows=config.record_prompts_limit,
    )


def history_retention(config: Config) -> HistoryRetention:
    return HistoryRetention(
        change_days=config.history_retention_days,
        change_rows=config.history_retention_rows,
        resync_days=config.audit_retention_days,
        resync_rows=config.audit_retention_rows,
        stream_days=config.history_retention_days,
        replica_hours=config.replica_retention_hours,
    )


def warm_up(config: Config) -> WarmUp:
    return WarmUp(config.ready_synchronized_share, config.ready_wait_seconds)
