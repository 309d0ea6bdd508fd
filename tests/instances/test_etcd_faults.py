"""What refusals and broken connections are called, and what is said to help."""

from __future__ import annotations

import http.client
import ssl

import pytest

from routing.instances.etcd_faults import connection_fault, explained, reading
from routing.instances.etcd_wire import EtcdRefusedError
from routing.instances.keys import KeyNames, KeyRange

CA = "if it speaks TLS, KVPORTAL_ETCD_CA must be set"
CERTIFICATE = "it may want a certificate: set KVPORTAL_ETCD_CERT and KVPORTAL_ETCD_KEY"


@pytest.mark.parametrize(
    ("error", "tls", "told"),
    [
        (http.client.RemoteDisconnected("x"), False, f"the server closed the connection; {CA}"),
        (ConnectionResetError(104, "reset"), False, f"the server closed the connection; {CA}"),
        (http.client.BadStatusLine("\x15\x03"), False, f"\x15\x03; {CA}"),
        (BrokenPipeError(32, "pipe"), True, "closed the connection; if it wants a certificate, set"),
        (ssl.SSLError(1, "[SSL: X_CERTIFICATE_REQUIRED]"), True, CERTIFICATE),
        (
            ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"),
            True,
            "if it speaks no TLS, leave KVPORTAL_ETCD_CA out",
        ),
        (ssl.SSLCertVerificationError(1, "verify failed"), True, "KVPORTAL_ETCD_CA must name the authority"),
    ],
)
def test_a_first_connection_that_breaks_is_told_with_the_settings_that_may_be_wrong(
    error: BaseException, tls: bool, told: str
) -> None:
    assert told in connection_fault(error, tls=tls, answered=False)
    assert "KVPORTAL" not in connection_fault(error, tls=tls, answered=True)


@pytest.mark.parametrize(
    ("error", "told"),
    [(TimeoutError(), "no answer in time"), (ConnectionRefusedError(111, "refused"), "[Errno 111] refused")],
)
@pytest.mark.parametrize("tls", [True, False])
def test_what_has_nothing_to_do_with_settings_is_told_as_it_is(
    error: BaseException, told: str, tls: bool
) -> None:
    assert connection_fault(error, tls=tls, answered=False) == told


@pytest.mark.parametrize(
    ("text", "user", "told"),
    [
        ("etcdserver: user name is empty", "", "set ETCD_USERNAME and ETCD_PASSWORD"),
        ("etcdserver: authentication failed, invalid user", "kv", "check ETCD_USERNAME and ETCD_PASSWORD"),
        ("etcdserver: permission denied", "kv", "the user 'kv' has no right to read the keys from 'XLLM:DEC"),
    ],
)
def test_a_refusal_says_what_to_do_and_keeps_what_etcd_said(text: str, user: str, told: str) -> None:
    found = explained(EtcdRefusedError(7, text), user, reading(KeyNames().range))
    assert told in str(found)
    assert str(found).endswith(f" ({text})")
    assert found.wants_token


def test_any_other_refusal_stays_as_it_is() -> None:
    error = EtcdRefusedError(3, "etcdserver: request is too large")
    assert explained(error, "kv", "write") is error


def test_one_key_is_no_range() -> None:
    assert reading(KeyRange(b"k1", b"")) == "read the key 'k1'"
