"""The client against a real etcd: calls, failover, passwords, TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from routing.instances.etcd import EtcdClient, EtcdSettings
from routing.instances.etcd_wire import (
    EtcdHistoryError,
    EtcdRefusedError,
    EtcdUnavailableError,
    WatchAnswer,
    deleting,
    mod_revision_is,
    putting,
)
from routing.instances.keys import KeyNames, KeyRange
from tests.instances.certificates import write_certificates
from tests.instances.support import TestEtcd, closed_port, quick_settings, silent_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("etcd")

ALL = KeyRange(b"k", b"l")


@contextmanager
def client_of(settings: EtcdSettings) -> Iterator[EtcdClient]:
    with closing(EtcdClient(settings)) as client:
        yield client


@pytest.fixture
def client(common_etcd: TestEtcd) -> Iterator[EtcdClient]:
    with client_of(quick_settings(common_etcd.endpoint)) as client:
        yield client


def events_of(
    client: EtcdClient, keys: KeyRange, start: int, count: int
) -> list[tuple[bytes, bytes | None, int]]:
    stream = client.watch(keys, start)
    try:
        found: list[tuple[bytes, bytes | None, int]] = []
        for answer in stream:
            found += [(event.key, event.value, event.mod_revision) for event in answer.events]
            if len(found) >= count:
                return found
    finally:
        stream.close()
    raise AssertionError("the watch ended")


def test_put_get_delete_and_range(client: EtcdClient) -> None:
    first = client.put("k1", b"\x00\xff")
    assert client.put("k2", b"two") == first + 1
    assert client.get("k1") == b"\x00\xff"
    assert client.get("missing") is None
    page = client.range(ALL)
    assert [(kv.key, kv.value) for kv in page.kvs] == [(b"k1", b"\x00\xff"), (b"k2", b"two")]
    assert (page.count, page.revision, page.more) == (2, first + 1, False)
    newest = client.range(ALL, limit=1, keys_only=True, newest_first=True)
    assert [(kv.key, kv.value, kv.mod_revision) for kv in newest.kvs] == [(b"k2", b"", first + 1)]
    assert (newest.count, newest.more) == (2, True)
    assert client.delete("k1")
    assert not client.delete("k1")


def test_a_transaction_happens_whole_or_not_at_all(client: EtcdClient) -> None:
    revision = client.put("k1", b"1")
    assert client.transact([mod_revision_is("k1", revision), mod_revision_is("k2", 0)], [putting("k2", b"2")])
    assert not client.transact([mod_revision_is("k2", 0)], [putting("k1", b"x"), deleting("k2")])
    assert (client.get("k1"), client.get("k2")) == (b"1", b"2")


def test_leases_hold_keys_and_take_them_along(client: EtcdClient) -> None:
    lease = client.grant_lease(60)
    client.put("k1", b"1", lease=lease)
    assert client.keep_alive(lease)
    client.revoke_lease(lease)
    client.revoke_lease(lease)
    assert client.get("k1") is None
    assert not client.keep_alive(lease)


def test_a_watch_begins_at_a_revision_of_the_past(client: EtcdClient) -> None:
    first = client.put("k1", b"1")
    client.put("other", b"x")
    client.delete("k1")
    client.put("k2", b"2")
    assert events_of(client, ALL, first, 3) == [
        (b"k1", b"1", first),
        (b"k1", None, first + 2),
        (b"k2", b"2", first + 3),
    ]
    stream = client.watch(ALL, first + 2)
    assert next(answer.events for answer in stream if answer.events)[0].previous == b"1"
    stream.close()


def test_large_answers_come_in_pieces_that_say_so(client: EtcdClient) -> None:
    first = client.put("k0", b"x" * 1_000_000)
    for n in range(1, 6):
        client.put(f"k{n}", b"x" * 1_000_000)
    stream = client.watch(ALL, first)
    answers: list[WatchAnswer] = []
    for answer in stream:
        answers.append(answer)
        if sum(len(a.events) for a in answers) == 6:
            break
    stream.close()
    assert [answer.partial for answer in answers] == [True] * (len(answers) - 1) + [False]
    assert len(answers) > 1


def test_a_compacted_revision_is_told(client: EtcdClient) -> None:
    first = client.put("k1", b"1")
    client.put("k1", b"2")
    client.put("k1", b"3")
    client.compact(first + 2)
    with pytest.raises(EtcdHistoryError):
        events_of(client, ALL, first, 3)
    with pytest.raises(EtcdHistoryError):
        client.range(ALL, revision=first)


def test_a_kept_connection_that_the_server_closed_is_replaced(
    own_etcd: TestEtcd,
) -> None:
    with client_of(quick_settings(own_etcd.endpoint)) as client:
        client.put("k1", b"1")
        own_etcd.restart()
        assert client.get("k1") == b"1"


def test_another_endpoint_is_used_when_one_does_not_answer(own_etcd: TestEtcd) -> None:
    with closed_port() as closed, silent_port() as silent:
        others = (f"127.0.0.1:{port}" for port in (closed, silent))
        with client_of(quick_settings(*others, own_etcd.endpoint)) as client:
            client.put("k1", b"1")
            assert client.endpoint == own_etcd.endpoint
            own_etcd.restart()
            client.put("k2", b"2")
            assert client.endpoint == own_etcd.endpoint


def test_when_none_answers_every_endpoint_is_named_with_its_fault(own_etcd: TestEtcd) -> None:
    own_etcd.freeze()
    with (
        closed_port() as port,
        client_of(quick_settings(f"127.0.0.1:{port}", own_etcd.endpoint)) as client,
    ):
        with pytest.raises(EtcdUnavailableError) as caught:
            client.get("k1")
    assert f"127.0.0.1:{port}: [Errno 111]" in str(caught.value)
    assert f"{own_etcd.endpoint}: no answer in time" in str(caught.value)
    own_etcd.thaw()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.1 500 X\r\n\r\n{}", b"SSH-2.0\r\n"]
)
def test_something_that_is_not_etcd_is_an_error_that_can_be_shown(answer: bytes) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        settings = quick_settings(f"127.0.0.1:{server.getsockname()[1]}")
        with client_of(settings) as client, pytest.raises((EtcdUnavailableError, EtcdRefusedError)):
            client.get("k1")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_abort_wakes_up_a_watch_and_a_call(common_etcd: TestEtcd) -> None:
    client = EtcdClient(quick_settings(common_etcd.endpoint, request_timeout=30.0))
    stream = client.watch(ALL, 1)
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in stream:
                pass
        except Exception as error:  # noqa: BLE001 - looked at below
            ended.append(error)
        try:
            client.get("k1")
        except Exception as error:  # noqa: BLE001 - looked at below
            ended.append(error)
        stream.close()
        client.close()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    client.abort()
    thread.join(5)
    assert not thread.is_alive()
    assert [isinstance(error, EtcdUnavailableError) for error in ended] == [True, True]


# ---- passwords


patient_settings = partial(quick_settings, request_timeout=10.0)
"""A password takes etcd some computing."""


def test_a_user_is_let_in_and_nobody_else(guarded_etcd: TestEtcd) -> None:
    with client_of(patient_settings(guarded_etcd.endpoint, username="root", password="secret")) as client:
        client.put("k1", b"1")
        assert events_of(client, ALL, 1, 1)[0][0] == b"k1"
    wrong = patient_settings(guarded_etcd.endpoint, username="root", password="wrong")
    with client_of(wrong) as client, pytest.raises(EtcdRefusedError, match="check ETCD_USERNAME and ETCD_P"):
        client.get("k1")
    nobody = patient_settings(guarded_etcd.endpoint)
    with (
        client_of(nobody) as client,
        pytest.raises(EtcdRefusedError, match="set ETCD_USERNAME and ETCD_PASS"),
    ):
        client.get("k1")


def test_a_password_is_only_sent_once_it_is_asked_for(tmp_path: Path) -> None:
    with TestEtcd(tmp_path) as server:
        with client_of(patient_settings(server.endpoint, username="root", password="secret")) as client:
            client.put("k1", b"1")
            server.ask_for_password("secret")
            assert client.get("k1") == b"1"


def test_a_token_that_no_longer_counts_is_renewed(guarded_etcd: TestEtcd) -> None:
    with client_of(patient_settings(guarded_etcd.endpoint, username="root", password="secret")) as client:
        client.put("k1", b"1")
        guarded_etcd.restart()  # tokens live in the server's memory
        assert client.get("k1") == b"1"
        client._token = "stale.1"
        assert client.get("k1") == b"1"
        client._token = "stale.1"
        assert events_of(client, ALL, 1, 1)[0][0] == b"k1"


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdSettings(username="root", password="secret"))


def test_what_a_user_has_no_right_to_is_named(guarded_etcd: TestEtcd) -> None:
    guarded_etcd.add_user("guest", "secret", as_root="secret")
    names = KeyNames("prod-a")
    with client_of(patient_settings(guarded_etcd.endpoint, username="guest", password="secret")) as client:
        refused = (
            "the user 'guest' has no right to read the keys from '/prod-a/XLLM:DECODE:' up to "
            "'/prod-a/XLLM:PREFILL;' ("
        )
        for call in (lambda: client.range(names.range), lambda: client.watch(names.range, 1)):
            with pytest.raises(EtcdRefusedError) as caught:
                call()
            assert str(caught.value).startswith(refused)
        with pytest.raises(EtcdRefusedError, match="has no right to write the key 'k1'"):
            client.put("k1", b"1")


# ---- TLS


class TlsEtcd(TestEtcd):
    """An etcd that speaks TLS to clients and wants to see their certificate."""

    def command(self) -> list[str | Path]:
        plain, secure = (f"{scheme}://{self.endpoint}" for scheme in ("http", "https"))
        command = [str(part).replace(plain, secure) for part in super().command()]
        files = {"cert": "etcd.crt", "key": "etcd.key", "trusted-ca": "ca.crt"}
        named = [part for name, file in files.items() for part in (f"--{name}-file", self.directory / file)]
        return [*command, *named, "--client-cert-auth"]

    def ready(self) -> bool:
        with client_of(self.settings()) as client:
            try:
                client.get("k1")
            except EtcdUnavailableError:
                return False
            return True

    def settings(self, **more: str) -> EtcdSettings:
        files = {"ca": "ca.crt", "cert": "etcd.crt", "key": "etcd.key"}
        paths = {name: str(self.directory / file) for name, file in files.items()}
        return patient_settings(self.endpoint, **{**paths, **more})


def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    with TlsEtcd(tmp_path) as server:
        with client_of(server.settings()) as client:
            revision = client.put("k1", b"1")
            assert events_of(client, ALL, revision, 1) == [(b"k1", b"1", revision)]
            stream = client.watch(ALL, revision + 1)
            seen: list[str] = []

            def follow() -> None:
                try:
                    next(iter(stream))
                except Exception as error:  # noqa: BLE001 - looked at below
                    seen.append(type(error).__name__)

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            stream.interrupt()
            wait_until(lambda: seen, message="an interrupted watch over TLS must end")
            thread.join(5)
            stream.close()
        for settings, hint in (
            (server.settings(cert="", key=""), "set KVPORTAL_ETCD_CERT and KVPORTAL_ETCD_KEY"),
            (server.settings(ca=""), "verify failed.*KVPORTAL_ETCD_CA must name the authority"),
            (quick_settings(server.endpoint), "if it speaks TLS, KVPORTAL_ETCD_CA must be set"),
        ):
            with client_of(settings) as client, pytest.raises(EtcdUnavailableError, match=hint):
                client.get("k1")


def test_tls_to_a_server_without_it_says_so(common_etcd: TestEtcd, tmp_path: Path) -> None:
    write_certificates(tmp_path)
    settings = quick_settings(common_etcd.endpoint, ca=str(tmp_path / "ca.crt"))
    with client_of(settings) as client, pytest.raises(EtcdUnavailableError, match="leave KVPORTAL_ETCD_CA"):
        client.get("k1")


def test_a_server_that_has_answered_and_is_gone_is_no_matter_of_settings(own_etcd: TestEtcd) -> None:
    with client_of(quick_settings(own_etcd.endpoint)) as client:
        client.put("k1", b"1")
        own_etcd.kill()
        with pytest.raises(EtcdUnavailableError) as caught:
            client.get("k1")
        assert "KVPORTAL" not in str(caught.value)


def test_the_namespace_keeps_two_portals_apart(client: EtcdClient) -> None:
    for namespace in ("", "prod-a", "/prod-b/"):
        client.put(KeyNames(namespace).load("a:1"), namespace.encode())
    for namespace in ("", "prod-a", "/prod-b/"):
        (kv,) = client.range(KeyNames(namespace).range).kvs
        assert kv.value == namespace.encode()
