"""Instances from a real etcd: every transition of their life, loads in both directions, and faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from routing.instances.core import HealthSettings, HeartbeatResult
from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.keys import KeyNames
from routing.instances.load_writer import LoadWriter
from routing.instances.model import (
    HealthState,
    InstanceView,
    LoadReport,
    LoadSource,
    Registration,
    Role,
    Snapshot,
)
from routing.instances.probe import ProbeSettings
from routing.instances.registry import InstanceRegistry
from routing.instances.sources import EtcdSource, Instances
from tests.instances.proxy import Proxy
from tests.instances.support import (
    Engine,
    TestEtcd,
    closed_port,
    quick_settings,
    registration_value,
    states_of,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("etcd")

ACTIVE, LEASE_LOST, SUSPECT = HealthState
HEALTH = HealthSettings(lease_lost_heartbeat_timeout=0.4, suspect_timeout=0.6)
CALM = HealthSettings(lease_lost_heartbeat_timeout=60.0, suspect_timeout=60.0)
PROBE = ProbeSettings(timeout=0.5, attempts=2)
NAMES = KeyNames()


@contextmanager
def portal(settings: EtcdSettings, health: HealthSettings = CALM) -> Iterator[Instances]:
    registry = InstanceRegistry(health, PROBE)
    instances = Instances(registry, EtcdSource(registry, settings, load_interval=0.05))
    instances.start()
    try:
        yield instances
    finally:
        instances.stop()


def wait_for_instances(instances: Instances, count: int) -> Snapshot:
    wait_until(lambda: len(instances.registry.snapshot().instances) == count)
    return instances.registry.snapshot()


@dataclass
class Site:
    """One portal on one etcd, with an engine that answers."""

    etcd: TestEtcd
    client: EtcdClient
    instances: Instances
    engine: Engine

    def view(self, name: str = "") -> InstanceView | None:
        return self.instances.registry.snapshot().by_name.get(name or self.engine.name)

    def known(self, name: str = "") -> InstanceView:
        view = self.view(name)
        assert view is not None
        return view

    def state(self, name: str = "") -> HealthState | None:
        view = self.view(name)
        return None if view is None else view.state

    def wait(self, expected: HealthState | None, name: str = "") -> None:
        wait_until(
            lambda: self.state(name) is expected,
            10,
            lambda: f"{self.instances.registry.snapshot()} {self.instances.source.status()}",
        )

    def key(self, role: Role = Role.DEFAULT, name: str = "") -> str:
        return NAMES.registration(role, name or self.engine.name)

    def register(
        self, incarnation: str | None = "one", *, name: str = "", lease: int = 0, **fields: object
    ) -> int:
        value = registration_value(incarnation, **fields)
        return self.client.put(self.key(name=name), value, lease=lease)


@contextmanager
def site_on(etcd: TestEtcd, health: HealthSettings = CALM) -> Iterator[Site]:
    with (
        closing(EtcdClient(quick_settings(etcd.endpoint, request_timeout=2.0))) as client,
        Engine().serving() as engine,
        portal(quick_settings(etcd.endpoint, request_timeout=2.0), health) as instances,
    ):
        yield Site(etcd, client, instances, engine)


@pytest.fixture
def site(common_etcd: TestEtcd) -> Iterator[Site]:
    with site_on(common_etcd) as site:
        yield site


# ---- life


def test_a_registration_makes_an_instance_with_everything_it_says(site: Site) -> None:
    revision = site.register("one", type=0, dp_size=2, rpc_address="10.0.0.7:9000", something_new=[1])
    site.wait(ACTIVE)
    view = site.known()
    assert (view.incarnation_id, view.dp_size, view.revision, view.key) == ("one", 2, revision, site.key())


def test_a_refresh_keeps_the_life_and_a_new_incarnation_begins_another(site: Site) -> None:
    site.register("one")
    site.wait(ACTIVE)
    order = site.known().order
    site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(1, 0.5))
    revision = site.register("one", dp_size=3)
    wait_until(lambda: site.known().revision == revision)
    assert (site.known().order, site.known().dp_size) == (order, 3)
    assert site.known().load is not None
    site.register("two")
    wait_until(lambda: site.known().incarnation_id == "two")
    assert site.known().order > order
    assert site.known().load is None


def test_a_deletion_asks_the_engine(site: Site) -> None:
    site.register("one")
    site.wait(ACTIVE)
    site.client.delete(site.key())
    site.wait(LEASE_LOST)
    assert site.engine.asked == 1
    site.register("one")
    site.wait(ACTIVE)
    site.engine.status = 503
    site.client.delete(site.key())
    site.wait(SUSPECT)
    assert site.engine.asked == 3
    site.register("one")
    site.wait(ACTIVE)


def test_a_stale_deletion_of_an_old_incarnation_is_ignored(site: Site) -> None:
    """The old process had registered under another role; its lease ends after the new one came."""
    site.client.put(site.key(Role.PREFILL), registration_value("old"))
    site.wait(ACTIVE)
    site.client.put(site.key(Role.DEFAULT), registration_value("new"))
    wait_until(lambda: site.known().incarnation_id == "new")
    site.client.delete(site.key(Role.PREFILL))
    site.client.put(site.key(name="marker:1"), registration_value())
    site.wait(ACTIVE, "marker:1")
    assert (site.state(), site.known().registered, site.engine.asked) == (ACTIVE, True, 0)


def test_a_lease_that_ends_leads_through_all_states_and_out(common_etcd: TestEtcd) -> None:
    with site_on(common_etcd, HEALTH) as site:
        lease = site.client.grant_lease(1)
        site.register("one", lease=lease)
        site.wait(ACTIVE)
        seen: list[HealthState | None] = []
        site.instances.registry.subscribe(lambda: seen.append(site.state()))
        wait_until(lambda: seen and seen[-1] is None, 15)
        states = [state for n, state in enumerate(seen) if n == 0 or seen[n - 1] is not state]
        assert states == [ACTIVE, LEASE_LOST, SUSPECT, None]


def test_a_suspect_engine_recovers_by_heartbeats(common_etcd: TestEtcd) -> None:
    with site_on(common_etcd, HealthSettings(0.3, 60.0)) as site:
        site.register("one")
        site.wait(ACTIVE)
        registry = site.instances.registry
        states = states_of(registry, site.engine.name)
        site.client.delete(site.key())
        wait_until(lambda: states[-2:] == [LEASE_LOST, SUSPECT])
        seen = len(states)
        assert registry.heartbeat(site.engine.name, "two") is HeartbeatResult.OTHER_INCARNATION
        assert registry.heartbeat(site.engine.name, "one") is HeartbeatResult.ACCEPTED
        assert states[seen] is LEASE_LOST


def test_the_first_list_decides_the_roles_of_mix_by_the_order_of_creation(common_etcd: TestEtcd) -> None:
    with closing(EtcdClient(quick_settings(common_etcd.endpoint))) as client:
        for name in ("c:1", "a:1", "b:1"):
            client.put(NAMES.registration(Role.MIX, name), registration_value())
        client.put(NAMES.registration(Role.MIX, "c:1"), registration_value())
        roles = []
        for _ in range(2):
            with portal(quick_settings(common_etcd.endpoint)) as instances:
                snapshot = wait_for_instances(instances, 3)
                roles.append([(view.name, str(view.current_role)) for view in snapshot.instances])
    assert roles == [[("c:1", "DECODE"), ("a:1", "PREFILL"), ("b:1", "PREFILL")]] * 2


def test_only_the_own_namespace_is_seen(common_etcd: TestEtcd) -> None:
    with (
        closing(EtcdClient(quick_settings(common_etcd.endpoint))) as client,
        portal(quick_settings(common_etcd.endpoint, namespace="/prod-a/")) as instances,
    ):
        client.put("XLLM:DEFAULT:plain:1", registration_value())
        client.put("/prod-b/XLLM:DEFAULT:other:1", registration_value())
        client.put("/prod-a/XLLM:DEFAULT:own:1", registration_value())
        wait_until(lambda: instances.registry.snapshot().instances)
        assert set(instances.registry.snapshot().by_name) == {"own:1"}


BROKEN = {
    "nonsense": b"nonsense",
    "wrong types": b'{"incarnation_id": "two", "dp_size": "many"}',
    "a mebibyte": registration_value("two", padding="x" * 1_048_576),
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_value_that_does_not_parse_is_skipped_and_shown_and_touches_nothing_else(
    site: Site, content: bytes
) -> None:
    site.register("one")
    site.wait(ACTIVE)
    order = site.known().order
    site.client.put(site.key(), content)
    site.client.put(NAMES.load(site.engine.name), content)
    site.client.put(site.key(name="broken:1"), content)
    site.client.put(site.key(name="fine:1"), registration_value())
    site.wait(ACTIVE, "fine:1")
    assert (site.known().order, site.known().incarnation_id) == (order, "one")
    assert site.view("broken:1") is None
    invalid = site.instances.source.status().invalid
    assert {value.key for value in invalid} == {
        site.key(),
        site.key(name="broken:1"),
        NAMES.load(site.engine.name),
    }
    site.register("one")
    site.client.delete(site.key(name="broken:1"))
    site.client.delete(NAMES.load(site.engine.name))
    wait_until(lambda: site.instances.source.status().invalid == ())


def test_a_portal_that_starts_late_skips_the_same_values(common_etcd: TestEtcd) -> None:
    with closing(EtcdClient(quick_settings(common_etcd.endpoint))) as client:
        for number, content in enumerate(BROKEN.values()):
            client.put(NAMES.registration(Role.DEFAULT, f"broken:{number}"), content)
        client.put(NAMES.registration(Role.DEFAULT, "fine:1"), registration_value())
        with portal(quick_settings(common_etcd.endpoint, request_timeout=2.0)) as instances:
            wait_until(lambda: instances.registry.snapshot().instances)
            assert set(instances.registry.snapshot().by_name) == {"fine:1"}
            assert len(instances.source.status().invalid) == len(BROKEN)


# ---- loads


def load_value(waiting: int, usage: float = 0.5) -> bytes:
    return json.dumps({"waiting_requests_num": waiting, "gpu_cache_usage_perc": usage}).encode()


def waiting(view: InstanceView | None) -> tuple[int, LoadSource] | None:
    load = view.load if view else None
    return None if load is None else (load.waiting_requests_num, load.source)


def test_loads_in_etcd_are_taken_ignored_and_cleared(site: Site) -> None:
    key = NAMES.load(site.engine.name)
    site.client.put(key, load_value(1))
    site.register("one")
    site.wait(ACTIVE)
    assert site.known().load is None, "a load older than the registration is another life's"
    site.client.put(key, load_value(2))
    wait_until(lambda: waiting(site.view()) == (2, LoadSource.ETCD))
    site.client.put(key, load_value(-1))
    wait_until(lambda: waiting(site.view()) == (-1, LoadSource.ETCD))
    assert not site.known().load.valid  # type: ignore[union-attr]
    site.client.delete(key)
    wait_until(lambda: site.known().load is None)


def test_after_registering_again_a_replica_that_runs_and_one_that_starts_know_the_same_load(
    site: Site,
) -> None:
    key = NAMES.load(site.engine.name)
    site.register("one")
    site.client.put(key, load_value(3))
    wait_until(lambda: waiting(site.view()) == (3, LoadSource.ETCD))
    revision = site.register("one")
    wait_until(lambda: site.known().revision == revision)
    with portal(quick_settings(site.etcd.endpoint)) as other:
        wait_until(lambda: other.registry.snapshot().instances)
        late = other.registry.snapshot().by_name[site.engine.name]
        assert (late.revision, waiting(late), waiting(site.view())) == (revision, None, None)
        site.client.put(key, load_value(4))
        for registry in (site.instances.registry, other.registry):
            snapshot = registry.snapshot
            wait_until(partial(lambda now: waiting(now().by_name[site.engine.name]) is not None, snapshot))
            assert waiting(snapshot().by_name[site.engine.name]) == (4, LoadSource.ETCD)


def test_a_heartbeat_here_beats_etcd_and_reaches_other_replicas(site: Site) -> None:
    with portal(quick_settings(site.etcd.endpoint)) as other:
        site.register("one")
        site.wait(ACTIVE)
        wait_until(lambda: other.registry.snapshot().instances)
        site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(7, 0.25))
        assert waiting(site.view()) == (7, LoadSource.HEARTBEAT)
        there = other.registry.snapshot
        wait_until(lambda: waiting(there().by_name[site.engine.name]) == (7, LoadSource.ETCD))
        site.client.put(NAMES.load(site.engine.name), load_value(1))
        wait_until(lambda: waiting(there().by_name[site.engine.name]) == (1, LoadSource.ETCD))
        assert waiting(site.view()) == (7, LoadSource.HEARTBEAT)


def test_many_loads_are_written_in_batches(site: Site) -> None:
    names = [f"10.0.0.{n}:8000" for n in range(100)]
    for name in names:
        site.register("one", name=name)
    wait_until(lambda: len(site.instances.registry.snapshot().instances) == 100)
    before = site.client.range(NAMES.range).revision
    for number, name in enumerate(names):
        site.instances.registry.heartbeat(name, "one", LoadReport(number, 0.5))
    wait_until(lambda: site.client.get(NAMES.load(names[-1])) is not None)
    wait_until(lambda: all(site.client.get(NAMES.load(name)) is not None for name in names))
    # A transaction is one revision, however many keys it writes.
    assert site.client.range(NAMES.range).revision - before <= 10
    assert json.loads(site.client.get(NAMES.load(names[42])) or b"")["waiting_requests_num"] == 42


def test_the_load_of_a_process_that_was_replaced_is_not_written(own_etcd: TestEtcd) -> None:
    """The portal is cut off from the news that the process was replaced, and only from that."""
    with (
        closing(EtcdClient(quick_settings(own_etcd.endpoint))) as client,
        Proxy(own_etcd.ports[0]) as proxy,
        portal(quick_settings(proxy.endpoint, heartbeat_interval=30.0)) as instances,
    ):
        name, key = "10.0.0.7:8000", NAMES.registration(Role.DEFAULT, "10.0.0.7:8000")
        client.put(key, registration_value("one"))
        client.put(NAMES.registration(Role.DEFAULT, "other:1"), registration_value("one"))
        wait_until(lambda: len(instances.registry.snapshot().instances) == 2)
        wait_until(lambda: instances.source.status().connected)
        proxy.stall_watches()
        client.put(key, registration_value("two"))
        assert instances.registry.heartbeat(name, "one", LoadReport(9, 0.5)) is HeartbeatResult.ACCEPTED
        instances.registry.heartbeat("other:1", "one", LoadReport(3, 0.5))
        wait_until(lambda: client.get(NAMES.load("other:1")) is not None)
        assert client.get(NAMES.load(name)) is None


def test_the_load_of_an_engine_without_lease_is_still_written_and_goes_when_it_is_removed(
    common_etcd: TestEtcd,
) -> None:
    with site_on(common_etcd, HealthSettings(2.0, 0.5)) as site:
        site.register("one")
        site.wait(ACTIVE)
        site.client.delete(site.key())
        site.wait(LEASE_LOST)
        site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(4, 0.5))
        key = NAMES.load(site.engine.name)
        wait_until(lambda: site.client.get(key) is not None)
        site.wait(None)
        wait_until(lambda: site.client.get(key) is None)


def test_the_load_goes_when_the_instance_is_removed_although_etcd_was_away_meanwhile(
    own_etcd: TestEtcd,
) -> None:
    with site_on(own_etcd, HealthSettings(0.3, 0.3)) as site:
        site.register("one")
        site.register("one", name="stays:1")
        site.wait(ACTIVE)
        site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(4, 0.5))
        key = NAMES.load(site.engine.name)
        wait_until(lambda: site.client.get(key) is not None)
        site.client.delete(site.key())
        wait_until(lambda: not site.known().registered)
        own_etcd.kill()
        site.wait(None)
        wait_until(lambda: not site.instances.source.status().connected)
        own_etcd.start()
        wait_until(lambda: site.client.get(key) is None)


def test_loads_left_behind_go_unless_somebody_still_writes_them_or_has_registered(
    common_etcd: TestEtcd,
) -> None:
    with closing(EtcdClient(quick_settings(common_etcd.endpoint, request_timeout=5.0))) as client:
        for name in ("lives:1", "left:1", "written:1", "registered:1"):
            client.put(NAMES.load(name), load_value(1))
        client.put("XLLM:LOADMETRICS:", b"nobody's")
        client.put(NAMES.registration(Role.MIX, "lives:1"), registration_value())
        client.put(NAMES.registration(Role.DECODE, "registered:1"), registration_value())
        # This portal does not know of the one that is registered as well.
        views = {"lives:1": InstanceView(Registration("lives:1"), 0, Role.DECODE, ACTIVE, 0.0, "")}
        writer = LoadWriter(
            quick_settings(common_etcd.endpoint, request_timeout=5.0),
            lambda: Snapshot(tuple(views.values()), views),
            interval=0.02,
            orphan_seconds=3.0,
        )
        writer.start()
        try:
            wait_until(lambda: writer._orphans is not None)
            client.put(NAMES.load("written:1"), load_value(2))
            wait_until(lambda: client.get(NAMES.load("left:1")) is None)
            wait_until(lambda: writer._orphans == {})
        finally:
            writer.stop()
        left = {kv.key.decode().rpartition("LOADMETRICS:")[2] for kv in client.range(NAMES.loads).kvs}
        assert left == {"", "lives:1", "written:1", "registered:1"}


def test_loads_are_written_once_etcd_is_back(own_etcd: TestEtcd) -> None:
    with site_on(own_etcd) as site:
        site.register("one")
        site.wait(ACTIVE)
        own_etcd.kill()
        wait_until(lambda: not site.instances.source.status().connected)
        site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(5, 0.5))
        own_etcd.start()
        expected = {"waiting_requests_num": 5, "gpu_cache_usage_perc": 0.5}
        wait_until(lambda: json.loads(site.client.get(NAMES.load(site.engine.name)) or b"{}") == expected)


# ---- faults


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_while_etcd_is_away_instances_stay_and_nothing_waits(own_etcd: TestEtcd, fault: str) -> None:
    with site_on(own_etcd) as site:
        site.register("one")
        site.wait(ACTIVE)
        before = site.instances.registry.snapshot()
        own_etcd.kill() if fault == "killed" else own_etcd.freeze()
        wait_until(lambda: not site.instances.source.status().connected)
        # If one of these waited for etcd, it would be for the whole timeout of 2 s.
        for number in range(200):
            result = site.instances.registry.heartbeat(site.engine.name, "one", LoadReport(number, 0.5))
            assert (result, site.state()) == (HeartbeatResult.ACCEPTED, ACTIVE)
        assert site.instances.registry.snapshot().topology_version == before.topology_version
        status = site.instances.source.status()
        assert status.trouble == f"etcd is not connected: {status.error}"
        own_etcd.start() if fault == "killed" else own_etcd.thaw()
        wait_until(lambda: site.instances.source.status().connected)
        assert site.instances.source.status().trouble is None
        site.register("one", name="later:1")
        site.wait(ACTIVE, "later:1")
        assert site.instances.registry.snapshot().by_name[site.engine.name].order == before.instances[0].order


def test_after_a_compaction_gone_instances_are_asked_and_new_ones_are_there(own_etcd: TestEtcd) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(closing(EtcdClient(quick_settings(own_etcd.endpoint))))
        proxy = stack.enter_context(Proxy(own_etcd.ports[0]))
        stays, goes, dies = (stack.enter_context(Engine().serving()) for _ in range(3))
        instances = stack.enter_context(portal(quick_settings(proxy.endpoint)))
        port = stack.enter_context(closed_port())
        for engine in (stays, goes, dies):
            client.put(NAMES.registration(Role.DEFAULT, engine.name), registration_value("one"))
        wait_until(lambda: len(instances.registry.snapshot().instances) == 3)
        before = instances.registry.snapshot().by_name
        proxy.cut()
        wait_until(lambda: not instances.source.status().connected)
        client.delete(NAMES.registration(Role.DEFAULT, goes.name))
        dies.status = 500
        client.delete(NAMES.registration(Role.DEFAULT, dies.name))
        new = f"127.0.0.1:{port}"
        client.put(NAMES.registration(Role.DEFAULT, new), registration_value("one"))
        client.compact(client.range(NAMES.range).revision)
        proxy.mend()
        expected = {stays.name: ACTIVE, goes.name: LEASE_LOST, dies.name: SUSPECT, new: ACTIVE}
        wait_until(
            lambda: {v.name: v.state for v in instances.registry.snapshot().instances} == expected,
            10,
            lambda: f"{instances.registry.snapshot().instances}",
        )
        after = instances.registry.snapshot().by_name
        assert after[stays.name] is before[stays.name]
        wait_until(lambda: instances.source.status().relists == 1)


def test_a_thousand_keys_appear_in_one_step(common_etcd: TestEtcd) -> None:
    with closing(EtcdClient(quick_settings(common_etcd.endpoint))) as client:
        for n in range(500):
            client.put(NAMES.registration(Role.DEFAULT, f"10.0.0.1:{n + 1}"), registration_value())
            client.put(NAMES.load(f"10.0.0.1:{n + 1}"), load_value(n))
        registry = InstanceRegistry(CALM, PROBE)
        seen: list[int] = []
        registry.subscribe(lambda: seen.append(len(registry.snapshot().instances)))
        instances = Instances(registry, EtcdSource(registry, quick_settings(common_etcd.endpoint)))
        instances.start()
        try:
            wait_until(lambda: seen)
            assert seen == [500]
            loads = [view.load for view in registry.snapshot().instances]
            assert [load and load.waiting_requests_num for load in loads] == list(range(500))
        finally:
            instances.stop()


def test_stop_leaves_no_thread(common_etcd: TestEtcd) -> None:
    with portal(quick_settings(common_etcd.endpoint)) as instances:
        wait_until(lambda: instances.source.status().connected)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("etcd", "instance"))
    ]
