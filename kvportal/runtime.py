"""The composition root: builds every part from one `Config`, starts and stops them in order.

Lifetime, on whatever server:

* `Runtime(config)` builds; nothing runs, nothing is opened.
* `start()` prepares the process, checks the database, starts the threads and puts the endpoints in
  service. It blocks for as long as the database takes to answer.
* `attach(loop)` starts what lives on the server's event loop, as soon as there is one.
* `drain()`: `/readyz` answers 503 from now on.
* `detach()` ends what lives on the loop, before the loop is closed.
* `stop()` takes the endpoints out of service and ends the threads, the last started first.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from django.db import connections

from kvportal import parts
from kvportal.config.model import Config
from kvportal.database import require_migrated
from kvportal.facts import FactsReader
from kvportal.gauges import PortalGauges
from kvportal.guard import Guard, GuardSettings
from kvportal.health import Readiness
from kvportal.metrics import Metrics, Sources
from kvportal.operations import Operations
from kvportal.process import prepare_process
from kvportal.schema import schema_endpoint
from routing import console
from routing.decision_log import DecisionLog
from routing.decision_store import DecisionStore
from routing.endpoints import progress_endpoint, select_endpoint
from routing.endpoints_instances import delete_endpoint, heartbeat_endpoint, list_endpoint, put_endpoint
from routing.instances.follow import DiscoveryLoop
from routing.instances.model import Snapshot, SourceStatus
from routing.instances.sources import Instances
from routing.models import load_entered
from routing.selector import Selector
from streams import http
from streams.directory import Directory
from streams.discovery import DiscoverySettings
from streams.endpoints import query_endpoint, resync_endpoint, streams_endpoint
from streams.hit_watch import HitWatch
from streams.http import Endpoint
from streams.status import Fault, Match, StreamStatus

log = logging.getLogger(__name__)

PART_SECONDS = 1.5
"""How long one part may take to stop; most need milliseconds."""
ENTERED_SECONDS = 10.0
"""Between two attempts to read the instances entered in the admin, while that fails."""
THREADS = ("history", "live-sampler", "decision-log", "instance-clock")
ETCD_THREADS = ("etcd-watch", "etcd-heartbeat", "etcd-load-writer")
INDEX_THREADS = ("slot-janitor",)
DISCOVERY_THREADS = ("discovery",)


class Runtime:
    """One replica of the portal."""

    def __init__(self, config: Config, *, allowed_hosts: tuple[str, ...] = ("*",)) -> None:
        self.config = config
        self.replica = (
            config.replica_name or f"{socket.gethostname()}:{config.http_server_port or os.getpid()}"
        )
        self.metrics = Metrics(policy=config.load_balance_policy)
        self.instances = self._build_instances()
        self.decisions = DecisionLog(
            DecisionStore(self.replica, parts.decision_retention(config)),
            explain_share=config.decision_explain_share,
            record_prompts=config.record_prompts,
        )
        self.operations = Operations(
            self.replica,
            retention=parts.history_retention(config),
            discovery=self._discovery_settings is not None,
        )
        self.operations.history.add_chore("entered instances", ENTERED_SECONDS, self._read_entered)
        self.directory = self._build_directory()
        self.hits = HitWatch(self.directory) if self.directory else None
        self.discovery = self._build_discovery()
        self.selector = Selector(
            parts.routing_settings(config),
            self.instances.registry,
            index=self.hits,
            decisions=self.decisions,
            metrics=self.metrics,
            expiry_seconds=config.request_expiry_seconds,
        )
        self.operations.observe(self._gauges())
        self.facts = FactsReader(
            snapshot=self.snapshot,
            statuses=self.statuses,
            desired=self._desired_streams,
            kv_events=self.directory is not None,
            static_streams=bool(config.kv_events and config.kv_events.streams),
            follows_nothing=bool(config.kv_events and config.kv_events.follows_nothing),
            source_trouble=lambda: self.status().trouble,
        )
        self.readiness = Readiness(self.facts, parts.warm_up(config))
        self.guard = Guard(
            GuardSettings(config.internal_api_tokens, config.max_body_bytes, allowed_hosts=allowed_hosts),
            gates={
                "query": self.readiness.query_gate,
                "resync": self.readiness.index_gate,
                "select": self.readiness.serving_gate,
            },
            observer=self.metrics,
        )
        self._stops = ExitStack()

    # ---- building

    def _build_instances(self) -> Instances:
        health, probe = parts.health_settings(self.config), parts.probe_settings(self.config)
        if self.config.instance_source == "etcd":
            return Instances.from_etcd(parts.etcd_settings(self.config), health, probe)
        return Instances.embedded(health, probe, load_entered)

    @property
    def _discovery_settings(self) -> DiscoverySettings | None:
        """None unless discovery is enabled."""
        discovery = self.config.kv_events and self.config.kv_events.discovery
        return discovery if discovery and discovery.enabled else None

    def _build_directory(self) -> Directory | None:
        events = self.config.kv_events
        if events is None:
            return None
        directory = Directory(events.limits, on_change=self.operations.record_change, metrics=self.metrics)
        self.operations.follow(directory)
        return directory

    def _build_discovery(self) -> DiscoveryLoop | None:
        settings = self._discovery_settings
        if settings is None or self.directory is None:
            return None
        return DiscoveryLoop(
            self.instances.registry, self.directory, settings, self.directory.limits.max_streams
        )

    def _gauges(self) -> PortalGauges:
        return PortalGauges(
            statuses=self.statuses,
            registry=self.metrics.registry,
            instances=self.snapshot,
            source=self.status,
            exclusions=self.exclusions,
            selector=self.selector,
            decisions=self.decisions,
            hits=self.hits,
        )

    # ---- life

    def start(self) -> None:
        """Raises ProcessError, UnusableDatabaseError or what a part raises; then nothing is left running."""
        events = self.config.kv_events
        prepare_process(events.limits.max_streams if events else 0)
        require_migrated()
        for notice in self.config.notices:
            log.warning("%s", notice)
        self.selector.announce()
        try:
            self._start_parts()
        except BaseException:
            self._stops.close()
            raise
        finally:
            connections.close_all()  # this thread's: it asked once and serves no request
        global _current  # one swap of one reference
        _current = self
        # What exists now lives as long as the process. Taken out of the garbage collector's sight, it
        # no longer costs the loop pauses of 100 ms and more.
        gc.collect()
        gc.freeze()

    def _start_parts(self) -> None:
        self._begin(self.operations.start, self.operations.stop)
        self._begin(self.decisions.start, partial(self.decisions.stop, PART_SECONDS))
        if self.directory is not None:
            self._begin(self.directory.start, partial(self.directory.stop, PART_SECONDS))
        self._begin(self.instances.start, partial(self.instances.stop, PART_SECONDS))
        if self.discovery is not None:
            self._begin(self.discovery.start, partial(self.discovery.stop, PART_SECONDS))
        elif self.directory is not None and self.config.kv_events is not None:
            self.directory.set_desired(self.config.kv_events.streams)
        self.metrics.watch(self._sources())
        self._begin(lambda: console.install(self), lambda: console.install(None))
        self._begin(self._install_endpoints, lambda: http.install({}))
        self._begin(lambda: self.facts.up(self._threads()), self.facts.down)

    def _begin(self, start: Callable[[], object], stop: Callable[[], object]) -> None:
        """Registers `stop` first: it also has to end what a `start` that failed had begun."""
        self._stops.callback(stop)
        start()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.operations.attach(loop)

    def drain(self) -> None:
        self.facts.draining()

    def detach(self) -> None:
        self.operations.detach()

    def stop(self) -> None:
        """Every part is told, whatever another one raises. Harmless when nothing runs."""
        global _current  # one swap of one reference
        if _current is self:
            _current = None
            gc.unfreeze()
        self._stops.close()

    # ---- endpoints

    def _install_endpoints(self) -> None:
        opened = {**self.readiness.opened, **self.metrics.opened}
        http.install(self.guard.wrap(self._endpoints(), opened=opened))

    def _endpoints(self) -> Mapping[str, Endpoint]:
        """Every guarded endpoint by its name."""
        registry, most = self.instances.registry, self.config.max_query_tokens
        return {
            "query": query_endpoint(self.hits or _NoIndex(), max_query_tokens=most),
            "streams": streams_endpoint(self.statuses),
            "resync": resync_endpoint(self.statuses, self.operations.order_resync),
            "select": select_endpoint(self.selector, max_query_tokens=most),
            "progress": progress_endpoint(self.selector),
            "heartbeat": heartbeat_endpoint(registry),
            "instances": list_endpoint(registry, self.status, self.exclusions),
            "instance_put": put_endpoint(registry),
            "instance_delete": delete_endpoint(registry),
            "schema": schema_endpoint,
        }

    # ---- what readiness, metrics, the pages and the admin ask

    def statuses(self) -> tuple[StreamStatus, ...]:
        return () if self.directory is None else self.directory.statuses()

    def snapshot(self) -> Snapshot:
        return self.instances.registry.snapshot()

    def status(self) -> SourceStatus:
        """How the source of instances does."""
        return self.instances.source.status()

    def exclusions(self) -> Mapping[str, Fault]:
        """Why instances are not followed, by name."""
        return {} if self.discovery is None else self.discovery.exclusions()

    def reload_entered(self) -> None:
        """The instances entered in the admin changed."""
        self.instances.source.reload_entered()

    def _read_entered(self, _now: float) -> None:
        """Again, if the database was away when they were to be read."""
        if self.status().error is not None:
            self.reload_entered()

    def _desired_streams(self) -> int:
        if self.discovery is not None:
            return len(self.discovery.desired())
        return len(self.config.kv_events.streams) if self.config.kv_events else 0

    def _sources(self) -> Sources:
        etcd = self.config.instance_source == "etcd"
        return Sources(
            statuses=self.statuses,
            instances=lambda: self.snapshot().instances,
            etcd_connected=lambda: self.status().connected if etcd else None,
            decisions_dropped=lambda: self.decisions.health().dropped,
        )

    def _threads(self) -> tuple[str, ...]:
        """Threads without which the portal is broken."""
        return (
            *THREADS,
            *(ETCD_THREADS if self.config.instance_source == "etcd" else ()),
            *(INDEX_THREADS if self.directory is not None else ()),
            *(DISCOVERY_THREADS if self.discovery is not None else ()),
        )


class _NoIndex:
    """Stands in for the directory when the index is off; its gate answers before it is asked."""

    def query(self, prompt: bytes) -> tuple[Match, ...]:
        return ()


_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime that serves in this process; None before its start and after its stop."""
    return _current
