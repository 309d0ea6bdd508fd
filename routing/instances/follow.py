"""Keeps the directory's streams in step with the registered instances.

One thread looks at the registry's current snapshot every `refresh_interval_ms`, and at once when
something other than a load changed. It neither connects nor asks etcd; nobody who serves a request
waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

from routing.instances.model import Snapshot
from routing.instances.registry import InstanceRegistry
from streams.discovery import Discovery, DiscoverySettings, discover, retired_first
from streams.spec import StreamSpec
from streams.status import Fault

log = logging.getLogger(__name__)


class StreamDirectory(Protocol):
    """The part of the directory that discovery drives."""

    def set_desired(self, specs: Iterable[StreamSpec]) -> None: ...


class DiscoveryLoop:
    """Turns instances into streams until it is stopped."""

    def __init__(
        self,
        registry: InstanceRegistry,
        directory: StreamDirectory,
        settings: DiscoverySettings,
        max_streams: int,
    ) -> None:
        self._registry = registry
        self._directory = directory
        self._settings = settings
        self._max_streams = max_streams
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._specs: tuple[StreamSpec, ...] = ()
        self._orders: Mapping[str, int] = {}
        self._latest: tuple[int, Discovery] = (-1, Discovery((), {}))

    def start(self) -> None:
        self._registry.subscribe(self._changed.set)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread. The directory keeps the streams that it has."""
        self._stop.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def exclusions(self) -> Mapping[str, Fault]:
        """Why instances of the registry's current snapshot are not followed, by name."""
        return self._discovery(self._registry.snapshot()).exclusions

    def desired(self) -> tuple[StreamSpec, ...]:
        """Streams that the directory was last told to follow."""
        return self._specs

    def _run(self) -> None:
        while not self._stop.is_set():
            # Cleared before looking: a change that comes meanwhile is looked at in the next round.
            self._changed.clear()
            try:
                self._follow()
            except Exception:
                log.exception("following the instances failed; it is tried again in the next round")
            self._changed.wait(self._settings.refresh_interval_ms / 1000)

    def _follow(self) -> None:
        snapshot = self._registry.snapshot()
        wanted = self._discovery(snapshot).specs
        orders = {view.name: view.order for view in snapshot.instances}
        # The same specs may belong to another life, when the engine sends nothing to tell them apart.
        current = [s for s in self._specs if self._orders.get(s.instance_name) == orders.get(s.instance_name)]
        staying = retired_first(current, wanted)
        if staying != self._specs and not set(self._specs).isdisjoint(set(wanted) - set(staying)):
            self._directory.set_desired(staying)
        self._directory.set_desired(wanted)
        self._specs, self._orders = wanted, orders

    def _discovery(self, snapshot: Snapshot) -> Discovery:
        """The outcome for a snapshot, computed once as long as nothing but loads changes."""
        version, discovery = self._latest
        if version != snapshot.topology_version:
            discovery = discover(snapshot.instances, self._settings, self._max_streams)
            self._latest = (snapshot.topology_version, discovery)
        return discovery
