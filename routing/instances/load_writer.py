"""Writes the loads that heartbeats brought here into etcd, so that other replicas see them.

Once a second, in transactions of many keys. A load is only written while the registration that it
belongs to stands in etcd as we know it: otherwise the load of a process that is gone would be taken
for that of its successor. When an instance is removed, its load key goes too, unless somebody has
registered under the name again. So do, some time after the start, those that were left behind by
instances that went while no portal ran: nobody has registered under the name, and nobody writes the key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.etcd_faults import reading
from routing.instances.etcd_wire import EtcdError, deleting, mod_revision_is, putting
from routing.instances.keys import KeyNames
from routing.instances.model import InstanceView, LoadSource, Role, Snapshot
from routing.instances.registration import InvalidInputError, load_document

log = logging.getLogger(__name__)

INTERVAL: Final = 1.0
ORPHAN_SECONDS: Final = 60.0
"""A load of nobody that is not written for this long is removed. Other replicas, which may still know
the instance, write its load with every heartbeat."""
_BATCH: Final = 25
"""etcd takes 128 comparisons in a transaction; the removal of a load has up to five."""


@dataclass(frozen=True, slots=True)
class Write:
    """One key to write (or, without a value, to delete) if the comparisons hold."""

    compare: tuple[dict[str, Any], ...]
    change: dict[str, Any]


class LoadWriter:
    """Looks at the registry's snapshot once a second and writes what is new."""

    def __init__(
        self,
        settings: EtcdSettings,
        snapshot: Callable[[], Snapshot],
        *,
        interval: float = INTERVAL,
        orphan_seconds: float = ORPHAN_SECONDS,
    ) -> None:
        self._client = EtcdClient(settings)
        self._names = KeyNames(settings.namespace)
        self._snapshot = snapshot
        self._interval = interval
        self._orphan_seconds = orphan_seconds
        self._stop = threading.Event()
        self._written: dict[int, float] = {}
        """Life (`order`) → arrival of the heartbeat whose load was written last."""
        self._seen: set[str] = set()
        """Names of instances whose load key has not been removed since."""
        self._orphans: dict[str, int] | None = None
        """Name → mod_revision of loads without an instance; None: not looked for yet."""
        self._orphans_due = 0.0
        names = self._names
        self._rights = f"{reading(names.range)} and write those that start with {names.load('')!a}"
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="etcd-load-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        self._stop.set()
        self._client.abort()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                try:
                    self._round()
                    self._failing = False
                except (OSError, EtcdError) as error:
                    self._client.forget_token()
                    # The watch says that etcd is away; only what is particular to writing is news.
                    if not self._failing and not self._stop.is_set():
                        log.warning("loads cannot be written to etcd: %s", error)
                    self._failing = True
                except Exception:
                    log.exception("writing loads to etcd failed")
        finally:
            self._client.close()

    def _round(self) -> None:
        instances = self._snapshot().instances
        fresh = [view for view in instances if self._is_fresh(view)]
        self._send([load_write(self._names, view) for view in fresh])
        self._written = {view.order: self._written.get(view.order, -1.0) for view in instances}
        for view in fresh:
            assert view.load is not None  # noqa: S101 - that is what makes it fresh
            self._written[view.order] = view.load.received_at
        present = {view.name for view in instances}
        self._seen |= present
        gone = self._seen - present
        self._send([load_removal(self._names, name) for name in gone])
        self._seen -= gone
        self._clear_orphans(present)

    def _clear_orphans(self, present: Collection[str]) -> None:
        """Once: note the loads without an instance (when instances are known at all), and remove later
        those that still are as they were."""
        if self._orphans is None and present:
            found = self._stored_loads()
            self._orphans = {name: revision for name, revision in found.items() if name not in present}
            self._orphans_due = time.monotonic() + self._orphan_seconds
        elif self._orphans and time.monotonic() >= self._orphans_due:
            left = [(name, revision) for name, revision in self._orphans.items() if name not in present]
            self._send([load_removal(self._names, name, revision) for name, revision in left])
            self._orphans = {}

    def _stored_loads(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kv in self._client.range(self._names.loads, keys_only=True).kvs:
            with suppress(InvalidInputError):
                split = self._names.split(kv.key)
                if split is not None:
                    found[split[1]] = kv.mod_revision
        return found

    def _is_fresh(self, view: InstanceView) -> bool:
        load = view.load
        return (
            load is not None
            and load.source is LoadSource.HEARTBEAT
            and load.received_at > self._written.get(view.order, -1.0)
        )

    def _send(self, writes: Sequence[Write]) -> None:
        """All in one transaction; where one comparison fails, each on its own."""
        for start in range(0, len(writes), _BATCH):
            batch = writes[start : start + _BATCH]
            compare = [condition for write in batch for condition in write.compare]
            changes = [write.change for write in batch]
            if not self._client.transact(compare, changes, doing=self._rights):
                for write in batch:
                    self._client.transact(write.compare, [write.change], doing=self._rights)


def load_write(names: KeyNames, view: InstanceView) -> Write:
    """The load of an instance, to be written while its registration stands as we know it. (One whose
    lease was lost has none, and must not have got a new one meanwhile.)"""
    assert view.load is not None  # noqa: S101
    condition = mod_revision_is(view.key, view.revision if view.registered else 0)
    return Write((condition,), putting(names.load(view.name), load_document(view.load.report)))


def load_removal(names: KeyNames, name: str, revision: int | None = None) -> Write:
    """The load key of an instance that is gone, to be deleted unless the name is registered again, or
    the load was written after `revision`."""
    conditions = tuple(mod_revision_is(names.registration(role, name), 0) for role in Role)
    if revision is not None:
        conditions += (mod_revision_is(names.load(name), revision),)
    return Write(conditions, deleting(names.load(name)))
