"""Three etcd members, of which the one that is followed, as a rule the leader, is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from routing.instances.core import HealthSettings
from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.etcd_wire import EtcdError
from routing.instances.keys import KeyEvent, KeyNames
from routing.instances.model import Role
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from routing.instances.sources import EtcdSource, Instances
from tests.instances.support import etcd_cluster, quick_settings, registration_value
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("etcd")

NAMES = KeyNames()
A, B, C, D, E = (f"127.0.0.1:{port}" for port in range(1, 6))
Change = tuple[bytes, bytes | None, int]
T = TypeVar("T")


class RecordingSource(EtcdSource):
    """Remembers what the portal was told, each change once and in order."""

    def __init__(self, registry: InstanceRegistry, settings: EtcdSettings) -> None:
        self.told: list[Change] = []
        super().__init__(registry, settings)

    def _handle(self, events: Sequence[KeyEvent], *, listed: bool) -> None:
        self.told += [(event.key, event.value, event.mod_revision) for event in events]
        super()._handle(events, listed=listed)


@contextmanager
def portal(settings: EtcdSettings) -> Iterator[tuple[InstanceRegistry, RecordingSource]]:
    registry = InstanceRegistry(HealthSettings(60.0, 60.0), ProbeSettings(timeout=0.2, attempts=1))
    source = RecordingSource(registry, settings)
    instances = Instances(registry, source)
    instances.start()
    try:
        yield registry, source
    finally:
        instances.stop()


def insist(change: Callable[[], T]) -> T:
    """The result of a change, once there is a leader that makes it."""
    results: list[T] = []

    def made() -> bool:
        try:
            results.append(change())
        except EtcdError:
            return False
        return True

    wait_until(made, 20)
    return results[0]


class Engines:
    """Registers engines and takes them away again, by way of one member."""

    def __init__(self, endpoint: str) -> None:
        self.client = EtcdClient(quick_settings(endpoint, request_timeout=2.0))

    def register(self, name: str, incarnation: str) -> None:
        insist(partial(self.client.put, self._key(name), registration_value(incarnation)))

    def leave(self, name: str) -> None:
        insist(partial(self.client.delete, self._key(name)))

    def _key(self, name: str) -> str:
        return NAMES.registration(Role.DEFAULT, name)

    def history(self) -> list[Change]:
        """Every change there ever was, as this member tells it to somebody who comes new."""
        newest = insist(lambda: self.client.range(NAMES.range)).revision
        stream = insist(lambda: self.client.watch(NAMES.range, 1))
        changes: list[Change] = []
        with closing(stream):
            for answer in stream:
                changes += [(event.key, event.value, event.mod_revision) for event in answer.events]
                if changes and changes[-1][2] >= newest:
                    return changes
        raise AssertionError("the watch ended")

    def close(self) -> None:
        self.client.close()


def test_the_member_that_is_followed_is_killed_and_nothing_is_missed_or_invented(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as members:
        endpoints = [member.endpoint for member in members]
        with portal(quick_settings(*endpoints, request_timeout=3.0)) as (registry, source):

            def registered() -> dict[str, str | None]:
                views = registry.snapshot().instances
                return {view.name: view.incarnation_id for view in views if view.registered}

            def wait_for(expected: dict[str, str]) -> None:
                wait_until(lambda: registered() == expected, 20, lambda: f"{registered()} {source.status()}")

            wait_until(lambda: source.status().connected, 20)
            followed = members[endpoints.index(source.status().endpoint)]
            other = next(member for member in members if member is not followed)
            with closing(Engines(other.endpoint)) as engines:
                for name in (A, B, C):
                    engines.register(name, "one")
                wait_for({A: "one", B: "one", C: "one"})

                followed.kill()
                engines.leave(A)
                engines.register(D, "one")
                engines.register(B, "two")
                wait_for({B: "two", C: "one", D: "one"})
                wait_until(lambda: source.status().connected, 20)
                assert source.status().endpoint != followed.endpoint

                followed.start()
                engines.register(E, "one")
                engines.leave(C)
                wait_for({B: "two", D: "one", E: "one"})
                with closing(Engines(followed.endpoint)) as caught_up:
                    assert caught_up.history() == engines.history() == source.told
            status = source.status()
            assert (status.relists, status.invalid_total) == (0, 0)
            assert status.reconnects >= 1
