"""The loss-free watch against a real etcd and everything that can happen to it."""

from __future__ import annotations

import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest

from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.etcd_wire import EtcdError
from routing.instances.keys import KeyEvent, KeyRange
from routing.instances.watch import RangeWatcher
from tests.instances.proxy import Proxy
from tests.instances.support import TestEtcd, quick_settings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("etcd")

KEYS = KeyRange(b"k", b"l")


class Mirror:
    """What a watcher has told: every event, and the keys as they follow from them."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self.listings = 0
        self.keys: dict[bytes, tuple[bytes, int]] = {}
        self.fail_next = False

    def __call__(self, events: Sequence[KeyEvent], *, listed: bool) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the handler failed")
        self.listings += listed
        for event in events:
            self.events.append(event)
            if event.value is None:
                self.keys.pop(event.key, None)
            else:
                self.keys[event.key] = (event.value, event.mod_revision)


@contextmanager
def watching(settings: EtcdSettings) -> Iterator[tuple[RangeWatcher, Mirror]]:
    mirror = Mirror()
    watcher = RangeWatcher(settings, KEYS, mirror, seed=1)
    watcher.start()
    try:
        yield watcher, mirror
    finally:
        watcher.stop()


@contextmanager
def watching_by_proxy(
    server: TestEtcd, **settings: float
) -> Iterator[tuple[EtcdClient, Proxy, RangeWatcher, Mirror]]:
    """A watcher whose way to etcd can be cut, and a patient client with a way of its own."""
    with (
        closing(EtcdClient(quick_settings(server.endpoint, request_timeout=10.0))) as client,
        Proxy(server.ports[0]) as proxy,
        watching(quick_settings(proxy.endpoint, **settings)) as (watcher, mirror),
    ):
        yield client, proxy, watcher, mirror


def truth(server: TestEtcd, **more: str) -> dict[bytes, tuple[bytes, int]]:
    with closing(EtcdClient(quick_settings(server.endpoint, request_timeout=10.0, **more))) as client:
        return {kv.key: (kv.value, kv.mod_revision) for kv in client.range(KEYS).kvs}


def wait_connected(watcher: RangeWatcher, expected: bool = True) -> None:
    wait_until(lambda: watcher.state.connected is expected, 15, lambda: f"{watcher.state}")


def wait_same(server: TestEtcd, mirror: Mirror, watcher: RangeWatcher, **more: str) -> None:
    expected = truth(server, **more)
    wait_until(
        lambda: mirror.keys == expected,
        15,
        lambda: f"{watcher.state}\n{set(mirror.keys.items()) ^ set(expected.items())}",
    )


@pytest.fixture
def client(common_etcd: TestEtcd) -> Iterator[EtcdClient]:
    with closing(EtcdClient(quick_settings(common_etcd.endpoint, request_timeout=10.0))) as client:
        yield client


def test_the_first_list_comes_in_the_order_of_creation(common_etcd: TestEtcd, client: EtcdClient) -> None:
    names = [f"k{n}" for n in (7, 3, 9, 1)]
    for name in names:
        client.put(name, b"1")
    client.put("k3", b"2")
    client.put("other", b"x")
    with watching(quick_settings(common_etcd.endpoint)) as (watcher, mirror):
        wait_same(common_etcd, mirror, watcher)
    assert [event.key.decode() for event in mirror.events] == names


def test_a_list_of_many_pages_is_one_picture(common_etcd: TestEtcd, client: EtcdClient) -> None:
    order = list(range(150))
    random.Random(1).shuffle(order)
    for n in order:
        client.put(f"k{n:03}", b"1")
    with watching(quick_settings(common_etcd.endpoint)) as (watcher, mirror):
        wait_same(common_etcd, mirror, watcher)
    assert [int(event.key[1:]) for event in mirror.events] == order
    assert mirror.listings == 1


def test_changes_arrive_in_order_with_the_value_before(common_etcd: TestEtcd, client: EtcdClient) -> None:
    with watching(quick_settings(common_etcd.endpoint)) as (watcher, mirror):
        wait_connected(watcher)
        first = client.put("k1", b"1")
        client.put("k1", b"2")
        client.delete("k1")
        wait_until(lambda: len(mirror.events) == 3)
        told = [(event.value, event.previous, event.mod_revision) for event in mirror.events]
        assert told == [(b"1", None, first), (b"2", b"1", first + 1), (None, b"2", first + 2)]
        wait_until(lambda: watcher.state.revision == first + 2)


def test_large_values_are_no_trouble(common_etcd: TestEtcd, client: EtcdClient) -> None:
    for n in range(8):
        client.put(f"k{n}", b"x" * 1_048_576)
    with watching(quick_settings(common_etcd.endpoint, request_timeout=10.0)) as (watcher, mirror):
        wait_same(common_etcd, mirror, watcher)
        for n in range(8):
            client.put(f"k{n}", b"y" * 1_048_576)
        wait_same(common_etcd, mirror, watcher)
        assert watcher.state.reconnects == 0


def test_without_a_server_the_state_says_why_and_it_begins_when_there_is_one(own_etcd: TestEtcd) -> None:
    own_etcd.stop()
    with watching(quick_settings(own_etcd.endpoint)) as (watcher, mirror):
        wait_until(lambda: "refused" in (watcher.state.error or ""))
        assert not watcher.state.connected
        own_etcd.start()
        wait_connected(watcher)
        assert watcher.state.error is None
        assert mirror.events == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "routing.instances.watch"]


def test_a_server_that_cannot_be_reached_from_the_start_is_logged_once_and_so_is_its_return(
    own_etcd: TestEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own_etcd.stop()
    with watching(quick_settings(own_etcd.endpoint)) as (watcher, _):
        wait_until(lambda: warnings_of(caplog))
        own_etcd.start()
        wait_connected(watcher)
        wait_until(lambda: len(warnings_of(caplog)) == 2)
    first, second = warnings_of(caplog)
    assert first.startswith("etcd is not connected, no instance is known yet: ")
    assert "refused" in first
    assert second.startswith(f"etcd at {own_etcd.endpoint} is followed from revision ")


def test_a_server_that_hangs_up_is_logged_once_with_what_may_be_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with watching(quick_settings(f"127.0.0.1:{server.getsockname()[1]}")):
            for _ in range(8):
                server.accept()[0].close()
    (warning,) = warnings_of(caplog)
    assert "the server closed the connection; if it speaks TLS, KVPORTAL_ETCD_CA must be set" in warning


def test_a_missing_user_name_is_logged_with_the_variables_to_set(
    guarded_etcd: TestEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(quick_settings(guarded_etcd.endpoint, request_timeout=10.0)) as (watcher, _):
        wait_until(lambda: warnings_of(caplog))
        assert "set ETCD_USERNAME and ETCD_PASSWORD" in (watcher.state.error or "")
    (warning,) = warnings_of(caplog)
    assert "set ETCD_USERNAME and ETCD_PASSWORD" in warning


def test_another_reason_is_logged_when_some_time_has_passed(
    own_etcd: TestEtcd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_etcd.stop()
    with watching(quick_settings(own_etcd.endpoint)) as (watcher, _):
        wait_until(lambda: warnings_of(caplog))
        own_etcd.start()
        own_etcd.ask_for_password("secret")
        own_etcd.kill()
        monkeypatch.setattr("routing.instances.watch._NEWS_SECONDS", 0.0)
        own_etcd.start()
        wait_until(lambda: "ETCD_USERNAME" in warnings_of(caplog)[-1])
        assert not watcher.state.connected


def test_a_killed_server_is_resumed_from_where_it_was(own_etcd: TestEtcd) -> None:
    with (
        closing(EtcdClient(quick_settings(own_etcd.endpoint, request_timeout=10.0))) as client,
        watching(quick_settings(own_etcd.endpoint)) as (watcher, mirror),
    ):
        wait_connected(watcher)
        client.put("k1", b"1")
        wait_same(own_etcd, mirror, watcher)
        own_etcd.kill()
        wait_connected(watcher, False)
        assert mirror.keys, "what is known stays while the server is away"
        own_etcd.start()
        client.put("k2", b"2")
        wait_same(own_etcd, mirror, watcher)
        assert (mirror.listings, watcher.state.relists) == (0, 0)
        assert watcher.state.reconnects >= 1


def test_a_frozen_server_is_noticed_and_followed_again_once_it_moves(own_etcd: TestEtcd) -> None:
    with (
        closing(EtcdClient(quick_settings(own_etcd.endpoint, request_timeout=10.0))) as client,
        watching(quick_settings(own_etcd.endpoint)) as (watcher, mirror),
    ):
        wait_connected(watcher)
        since = watcher.state.since
        own_etcd.freeze()
        wait_connected(watcher, False)
        assert "no answer in time" in (watcher.state.error or "")
        assert watcher.state.since > since
        own_etcd.thaw()
        client.put("k1", b"1")
        wait_connected(watcher)
        wait_same(own_etcd, mirror, watcher)
        assert watcher.state.relists == 0


def test_what_happened_while_cut_off_is_made_up_for(own_etcd: TestEtcd) -> None:
    with watching_by_proxy(own_etcd) as (client, proxy, watcher, mirror):
        client.put("k1", b"1")
        client.put("k2", b"1")
        wait_same(own_etcd, mirror, watcher)
        seen = len(mirror.events)
        proxy.cut()
        wait_connected(watcher, False)
        client.put("k1", b"2")
        client.delete("k2")
        client.put("k3", b"1")
        proxy.mend()
        wait_same(own_etcd, mirror, watcher)
        assert [(event.key, event.value) for event in mirror.events[seen:]] == [
            (b"k1", b"2"),
            (b"k2", None),
            (b"k3", b"1"),
        ]
        assert watcher.state.relists == 0


def test_a_compaction_while_cut_off_is_reconciled_by_listing(own_etcd: TestEtcd) -> None:
    with watching_by_proxy(own_etcd) as (client, proxy, watcher, mirror):
        for name in ("k1", "k2", "k3"):
            client.put(name, b"1")
        wait_same(own_etcd, mirror, watcher)
        seen = len(mirror.events)
        proxy.cut()
        wait_connected(watcher, False)
        client.put("k1", b"2")
        client.delete("k2")
        client.put("k5", b"1")
        client.put("k4", b"1")
        client.compact(client.put("k4", b"2"))
        proxy.mend()
        wait_same(own_etcd, mirror, watcher)
        # Only what differs is told: writes in the order of creation, then what is gone.
        told = [(event.key, event.value) for event in mirror.events[seen:]]
        assert told == [(b"k1", b"2"), (b"k5", b"1"), (b"k4", b"2"), (b"k2", None)]
        wait_until(lambda: watcher.state.relists == 1)


def test_a_mute_watch_is_found_out(own_etcd: TestEtcd) -> None:
    with watching_by_proxy(own_etcd) as (client, proxy, watcher, mirror):
        client.put("k1", b"1")
        wait_connected(watcher)
        wait_same(own_etcd, mirror, watcher)
        proxy.stall_watches()
        client.delete("k1")
        wait_same(own_etcd, mirror, watcher)
        wait_until(lambda: watcher.state.connected and watcher.state.reconnects >= 1)
        proxy.stall_watches()
        client.put("k2", b"2")
        wait_same(own_etcd, mirror, watcher)


def test_a_quiet_watch_is_left_alone(common_etcd: TestEtcd, client: EtcdClient) -> None:
    client.put("k1", b"1")
    settings = quick_settings(common_etcd.endpoint, heartbeat_interval=0.02, request_timeout=10.0)
    with watching(settings) as (watcher, mirror):
        wait_same(common_etcd, mirror, watcher)
        for n in range(100):
            client.put("k1", str(n).encode())
            client.put("elsewhere", b"x")
        wait_same(common_etcd, mirror, watcher)
        assert (watcher.state.relists, watcher.state.reconnects) == (0, 0)
        assert len(mirror.events) == 101


def test_a_store_that_begins_anew_is_listed_and_old_keys_are_gone(own_etcd: TestEtcd) -> None:
    with (
        closing(EtcdClient(quick_settings(own_etcd.endpoint, request_timeout=10.0))) as client,
        watching(quick_settings(own_etcd.endpoint)) as (watcher, mirror),
    ):
        for n in range(20):
            client.put(f"k{n}", b"1")
        wait_same(own_etcd, mirror, watcher)
        own_etcd.kill()
        shutil.rmtree(own_etcd.directory / "etcd")
        own_etcd.start()
        client.put("k3", b"new")
        wait_same(own_etcd, mirror, watcher)
        wait_until(lambda: watcher.state.relists == 1)


def test_a_deletion_that_a_compaction_took_away_is_made_up_for_at_once(own_etcd: TestEtcd) -> None:
    """etcd lets a watch begin at the revision it compacted to; old ones have thrown away its deletion."""
    interval = 60.0  # of the heartbeat, which would find it out, too, some time
    with watching_by_proxy(own_etcd, heartbeat_interval=interval) as (client, proxy, watcher, mirror):
        for name in ("k1", "k2"):
            client.put(name, b"1")
        wait_same(own_etcd, mirror, watcher)
        proxy.cut()
        wait_connected(watcher, False)
        client.delete("k1")
        client.compact(client.range(KEYS).revision)
        proxy.mend()
        wait_same(own_etcd, mirror, watcher)
        assert mirror.events[-1].key == b"k1"
        wait_until(lambda: watcher.state.relists == 1)


def test_a_store_that_was_replaced_and_has_caught_up_meanwhile_is_listed(own_etcd: TestEtcd) -> None:
    with watching_by_proxy(own_etcd) as (client, proxy, watcher, mirror):
        for name in ("k1", "k2", "k3"):
            client.put(name, b"old")
        wait_same(own_etcd, mirror, watcher)
        proxy.cut()
        wait_connected(watcher, False)
        own_etcd.kill()
        shutil.rmtree(own_etcd.directory / "etcd")
        own_etcd.start()
        for name in ("elsewhere", "k1", "k2", "k3"):
            client.put(name, b"new")
        proxy.mend()
        wait_same(own_etcd, mirror, watcher)
        wait_until(lambda: watcher.state.relists == 1)


def test_a_watch_that_lost_a_deletion_is_found_out_although_it_moves(
    common_etcd: TestEtcd, client: EtcdClient
) -> None:
    client.put("k1", b"1")
    with watching(quick_settings(common_etcd.endpoint)) as (watcher, mirror):
        wait_connected(watcher)
        watcher._known[b"k2"] = 1  # as if its deletion had been lost on the way
        wait_until(
            lambda: client.put("k1", b"again") and (b"k2", None) in {(e.key, e.value) for e in mirror.events},
            message=lambda: f"{watcher.state}",
        )
        wait_until(lambda: watcher.state.relists == 1)


def test_another_endpoint_takes_over_from_a_frozen_one(own_etcd: TestEtcd) -> None:
    with (
        closing(EtcdClient(quick_settings(own_etcd.endpoint, request_timeout=10.0))) as client,
        Proxy(own_etcd.ports[0]) as first,
        Proxy(own_etcd.ports[0]) as second,
        watching(quick_settings(first.endpoint, second.endpoint)) as (watcher, mirror),
    ):
        wait_until(lambda: watcher.state.connected and watcher.state.endpoint == first.endpoint)
        first.cut()
        wait_until(lambda: watcher.state.connected and watcher.state.endpoint == second.endpoint)
        client.put("k1", b"1")
        wait_same(own_etcd, mirror, watcher)
        assert watcher.state.relists == 0


def test_a_handler_that_failed_is_told_everything_again(common_etcd: TestEtcd, client: EtcdClient) -> None:
    with watching(quick_settings(common_etcd.endpoint)) as (watcher, mirror):
        client.put("k1", b"1")
        wait_same(common_etcd, mirror, watcher)
        mirror.fail_next = True
        client.put("k2", b"2")
        wait_same(common_etcd, mirror, watcher)
        wait_until(lambda: watcher.state.relists == 1)
        assert [event.key for event in mirror.events] == [b"k1", b"k1", b"k2"]


# ---- passwords


def test_a_restart_that_forgets_all_tokens_is_survived(guarded_etcd: TestEtcd) -> None:
    login = {"username": "root", "password": "secret"}
    with (
        closing(EtcdClient(quick_settings(guarded_etcd.endpoint, request_timeout=10.0, **login))) as client,
        watching(quick_settings(guarded_etcd.endpoint, **login)) as (watcher, mirror),
    ):
        client.put("k1", b"1")
        wait_same(guarded_etcd, mirror, watcher, **login)
        guarded_etcd.restart()
        client.put("k2", b"2")
        wait_same(guarded_etcd, mirror, watcher, **login)
        wait_connected(watcher)
        assert watcher.state.relists == 0


def test_a_changed_password_is_shown_and_nothing_is_lost_once_it_fits_again(guarded_etcd: TestEtcd) -> None:
    login, other = ({"username": "root", "password": word} for word in ("secret", "other"))
    with watching(quick_settings(guarded_etcd.endpoint, **login)) as (watcher, mirror):
        wait_connected(watcher)
        guarded_etcd.change_password("secret", "other")
        wait_connected(watcher, False)
        wait_until(lambda: "authentication failed" in (watcher.state.error or ""))
        with closing(
            EtcdClient(quick_settings(guarded_etcd.endpoint, request_timeout=10.0, **other))
        ) as client:
            client.put("k1", b"1")
        guarded_etcd.change_password("other", "secret")
        wait_connected(watcher)
        wait_same(guarded_etcd, mirror, watcher, **login)
        assert watcher.state.relists == 0


# ---- stopping


@pytest.mark.parametrize("trouble", ["none", "away"])
def test_stop_is_prompt_whether_the_server_is_there_or_not(own_etcd: TestEtcd, trouble: str) -> None:
    settings = EtcdSettings((own_etcd.endpoint,), request_timeout=30.0, heartbeat_interval=0.05)
    watcher = RangeWatcher(settings, KEYS, Mirror())
    watcher.start()
    wait_connected(watcher)
    if trouble == "away":
        own_etcd.kill()
        wait_connected(watcher, False)
    watcher.stop(5.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("etcd-")]


def test_stop_does_not_wait_for_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = EtcdSettings((endpoint,), request_timeout=30.0, heartbeat_interval=0.01)
        watcher = RangeWatcher(settings, KEYS, Mirror())
        watcher.start()
        for _ in range(2):  # both threads have asked, and wait
            connection, _ = silent.accept()
            assert stack.enter_context(connection).recv(100)
        watcher.stop(5.0)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("etcd-")]


# ---- everything at once


class Writer(threading.Thread):
    """Writes and deletes its own keys, and insists until each change is made."""

    def __init__(self, number: int, server: TestEtcd, changes: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.left = changes
        self.written: set[bytes] = set()
        self.goal = 0
        """Changes that may be left before it waits for the next fault."""
        self._random = random.Random(number)
        self._server = server

    def run(self) -> None:
        alive: set[str] = set()
        with closing(EtcdClient(quick_settings(self._server.endpoint))) as client:
            while self.left:
                if self.left <= self.goal:
                    time.sleep(0.002)
                    continue
                key = f"k{self.number}-{self._random.randrange(8)}"
                if key in alive and self._random.random() < 0.4:
                    alive.discard(key)
                    self._insist(partial(client.delete, key))
                else:
                    alive.add(key)
                    value = f"{self.number}:{self.left}".encode()
                    self.written.add(value)
                    self._insist(partial(client.put, key, value))
                self.left -= 1

    def _insist(self, change: Callable[[], object]) -> None:
        while True:
            try:
                change()
                return
            except EtcdError:
                time.sleep(0.01)


def test_two_thousand_changes_by_four_writers_survive_every_fault(own_etcd: TestEtcd) -> None:
    """Writers pause at each fault until it has begun, so that every fault meets changes on both sides."""
    writers = [Writer(number, own_etcd, 500) for number in range(4)]
    with Proxy(own_etcd.ports[0]) as proxy, watching(quick_settings(proxy.endpoint)) as (watcher, mirror):

        def write_down_to(left: int) -> None:
            for writer in writers:
                writer.goal = left
            wait_until(lambda: all(writer.left <= left for writer in writers), 40)

        wait_connected(watcher)
        for writer in writers:
            writer.goal = 400
            writer.start()
        write_down_to(400)
        for writer in writers:
            writer.goal = 300
        own_etcd.kill()  # among the changes, not between them
        wait_connected(watcher, False)
        own_etcd.start()
        write_down_to(300)
        for writer in writers:
            writer.goal = 200
        own_etcd.freeze()
        wait_connected(watcher, False)
        own_etcd.thaw()
        write_down_to(200)
        wait_same(own_etcd, mirror, watcher)
        with closing(EtcdClient(quick_settings(own_etcd.endpoint, request_timeout=10.0))) as client:
            # So far every single change was told, once and in order.
            heard = [(event.key, event.value, event.mod_revision) for event in mirror.events]
            assert heard == told_from_the_start(client, heard[-1][2])
            assert watcher.state.relists == 0
            wait_connected(watcher)
            proxy.stall_watches()
            write_down_to(150)
            wait_same(own_etcd, mirror, watcher)
            proxy.cut()
            wait_connected(watcher, False)
            write_down_to(100)
            client.compact(client.range(KEYS).revision)
        for writer in writers:
            writer.goal = 0
        proxy.mend()
        write_down_to(0)
        wait_same(own_etcd, mirror, watcher)
        wait_connected(watcher)
    # And nothing was made up.
    written = set().union(*(writer.written for writer in writers))
    assert {event.value for event in mirror.events if event.value is not None} <= written
    revisions: dict[bytes, int] = {}
    for event in mirror.events:
        assert event.mod_revision > revisions.get(event.key, 0)
        revisions[event.key] = event.mod_revision


def told_from_the_start(client: EtcdClient, last: int) -> list[tuple[bytes, bytes | None, int]]:
    """Every change of the range up to a revision, as a fresh watch tells it."""
    stream = client.watch(KEYS, 1)
    found: list[tuple[bytes, bytes | None, int]] = []
    for answer in stream:
        found += [(event.key, event.value, event.mod_revision) for event in answer.events]
        if found and found[-1][2] >= last:
            break
    stream.close()
    return found
