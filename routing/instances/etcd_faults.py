"""What etcd's refusals and broken connections mean for whoever runs the portal, in words. Pure."""

from __future__ import annotations

import http.client
import ssl
from typing import Final

from routing.instances.etcd_wire import EtcdRefusedError
from routing.instances.keys import KeyRange

_CREDENTIALS: Final = "ETCD_USERNAME and ETCD_PASSWORD"
_OWN_CERTIFICATE: Final = "set KVPORTAL_ETCD_CERT and KVPORTAL_ETCD_KEY"
_WANTS_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "HANDSHAKE_FAILURE")


def explained(error: EtcdRefusedError, username: str, doing: str) -> EtcdRefusedError:
    """The same refusal, with what to do about it in front. `doing`: what was refused (`read ...`)."""
    text = str(error)
    if "user name is empty" in text:
        meaning = f"etcd wants to know who asks; set {_CREDENTIALS}"
    elif "authentication failed" in text:
        meaning = f"etcd does not know this user with this password; check {_CREDENTIALS}"
    elif "permission denied" in text:
        who = f"the user {username!a}" if username else "whoever has no user name"
        meaning = f"{who} has no right to {doing}"
    else:
        return error
    return EtcdRefusedError(error.code, f"{meaning} ({text})")


def reading(keys: KeyRange) -> str:
    """The right that a list and a watch take."""
    start, end = (ascii(key.decode(errors="replace")) for key in (keys.start, keys.end))
    return f"read the keys from {start} up to {end}" if keys.end else f"read the key {start}"


def connection_fault(error: BaseException, *, tls: bool, answered: bool) -> str:
    """Why there was no answer. `answered`: this server has answered before, so it is not its settings."""
    text = described(error)
    hint = None if answered else _hint(error, tls=tls)
    return f"{text}; {hint}" if hint else text


def described(error: BaseException) -> str:
    """An error of the connection in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if _is_closed(error):
        return "the server closed the connection"
    return str(error) or type(error).__name__


def _is_closed(error: BaseException) -> bool:
    closed = ConnectionResetError | ConnectionAbortedError | BrokenPipeError
    return isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | closed)


def _hint(error: BaseException, *, tls: bool) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "KVPORTAL_ETCD_CA must name the authority that signed its certificate"
    if tls and any(reason in str(error) for reason in _WANTS_CERTIFICATE):
        return f"it may want a certificate: {_OWN_CERTIFICATE}"
    if tls and (isinstance(error, ssl.SSLError) or _is_closed(error)):
        # A refused client learns of it after the handshake, if at all: a request may drown the alert out.
        return (
            f"if it wants a certificate, {_OWN_CERTIFICATE}; if it speaks no TLS, leave KVPORTAL_ETCD_CA out"
        )
    if not tls and (_is_closed(error) or isinstance(error, http.client.BadStatusLine)):
        return "if it speaks TLS, KVPORTAL_ETCD_CA must be set"
    return None
