"""Where instances come from: etcd, or the embedded registry. Either feeds one `InstanceRegistry`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from routing.instances.core import HealthSettings
from routing.instances.embedded import Entry, LeaseTable
from routing.instances.etcd import EtcdSettings
from routing.instances.keys import KeyEvent, KeyNames, KeyTable
from routing.instances.load_writer import INTERVAL, LoadWriter
from routing.instances.model import SourceStatus
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from routing.instances.watch import RangeWatcher

log = logging.getLogger(__name__)


class Source(Protocol):
    """Feeds the registry from `start` until `stop`."""

    def start(self) -> None: ...
    def stop(self, timeout: float = 3.0) -> None: ...
    def status(self) -> SourceStatus: ...
    def reload_entered(self) -> None:
        """The instances entered in the admin changed."""


class EtcdSource:
    """Follows the registrations in etcd and writes loads back."""

    def __init__(
        self, registry: InstanceRegistry, settings: EtcdSettings, *, load_interval: float = INTERVAL
    ) -> None:
        names = KeyNames(settings.namespace)
        self._registry = registry
        self._table = KeyTable(names)
        self._watcher = RangeWatcher(settings, names.range, self._handle)
        self._writer = LoadWriter(settings, registry.snapshot, interval=load_interval)

    def start(self) -> None:
        """Returns at once, whether etcd is there or not."""
        self._watcher.start()
        self._writer.start()

    def stop(self, timeout: float = 3.0) -> None:
        self._watcher.stop(timeout)
        self._writer.stop(timeout)

    def status(self) -> SourceStatus:
        state = self._watcher.state
        return SourceStatus(
            kind="etcd",
            connected=state.connected,
            since=state.since,
            error=state.error,
            endpoint=state.endpoint,
            revision=state.revision,
            relists=state.relists,
            reconnects=state.reconnects,
            invalid=self._table.invalid,
            invalid_total=self._table.invalid_total,
        )

    def reload_entered(self) -> None:
        """Instances entered in the admin belong to the embedded registry."""

    def _handle(self, events: Sequence[KeyEvent], *, listed: bool) -> None:
        before = self._table.invalid_total
        self._registry.apply(self._table.inputs(events, listed=listed))
        skipped, invalid = self._table.invalid_total - before, self._table.invalid
        if skipped and invalid:
            latest = invalid[-1]
            log.warning("%d value(s) in etcd are skipped; %s: %s", skipped, latest.key, latest.reason)


class EmbeddedSource:
    """Keeps the registry in step with the instances entered in the admin; the others come over HTTP."""

    def __init__(self, registry: InstanceRegistry, load_entered: Callable[[], Iterable[Entry]]) -> None:
        self._registry = registry
        self._load_entered = load_entered
        self._since = time.time()
        self._error: str | None = None

    def start(self) -> None:
        self.reload_entered()

    def stop(self, timeout: float = 3.0) -> None:
        """Nothing runs."""

    def status(self) -> SourceStatus:
        return SourceStatus(kind="embedded", connected=True, since=self._since, error=self._error)

    def reload_entered(self) -> None:
        """Read them again. A database that does not answer leaves everything as it was."""
        try:
            self._registry.set_entered(self._load_entered())
            self._error = None
        except Exception as error:
            log.exception("the instances entered in the admin cannot be read")
            self._error = f"the instances entered in the admin cannot be read: {error}"


class Instances:
    """The registry and what feeds it, started and stopped together."""

    def __init__(self, registry: InstanceRegistry, source: Source) -> None:
        self.registry = registry
        self.source = source

    @classmethod
    def from_etcd(
        cls,
        settings: EtcdSettings,
        health: HealthSettings | None = None,
        probe: ProbeSettings | None = None,
    ) -> Instances:
        """Raises OSError or ssl.SSLError when a certificate file cannot be used."""
        registry = InstanceRegistry(health, probe)
        return cls(registry, EtcdSource(registry, settings))

    @classmethod
    def embedded(
        cls,
        health: HealthSettings | None = None,
        probe: ProbeSettings | None = None,
        load_entered: Callable[[], Iterable[Entry]] = tuple,
    ) -> Instances:
        """`load_entered` reads the instances entered in the admin; it is called at the start and
        whenever they change."""
        registry = InstanceRegistry(health, probe, leases=LeaseTable())
        return cls(registry, EmbeddedSource(registry, load_entered))

    def start(self) -> None:
        self.registry.start()
        self.source.start()

    def stop(self, timeout: float = 3.0) -> None:
        self.source.stop(timeout)
        self.registry.stop(timeout)
