"""A client for etcd 3.4 and later over its JSON gateway, on the standard library alone.

No Python client survives what this one has to (a frozen server, a compaction while cut off, an
expired token); the comparison is in docs/decisions. The gateway is plain HTTP: a POST of JSON per
call; a watch answers with one JSON document per line.

A client belongs to the thread that uses it. `abort` alone may be called from another thread.
Calls go to one endpoint at a time and move on to the next when it does not answer; everything that
is called here may safely be sent twice.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from routing.instances.etcd_faults import connection_fault, described, explained, reading
from routing.instances.etcd_wire import (
    EtcdRefusedError,
    EtcdUnavailableError,
    Page,
    WatchAnswer,
    base64_of,
    checked,
    page_of,
    watch_answer_of,
)
from routing.instances.keys import KeyRange

T = TypeVar("T")

_MAX_ANSWER_BYTES: Final = 128 * 1024 * 1024
_FAILED_PRECONDITION: Final = 9


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Where etcd is and how to be let in. Times in seconds."""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """`host:port` of each member, IPv6 in brackets."""
    namespace: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    """File of the authority that signed etcd's certificate. With it, or with a certificate of our
    own, TLS is spoken."""
    cert: str = ""
    key: str = ""
    request_timeout: float = 2.0
    heartbeat_interval: float = 2.0
    """Between two small requests that tell a frozen or forgotten watch from a quiet one."""
    max_backoff: float = 3.0
    """Longest pause between two attempts to reconnect."""

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises OSError or ssl.SSLError when a file cannot be used."""
        if not (self.ca or self.cert):
            return None
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        return context


class EtcdClient:
    """One caller's connection to etcd."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._tls = settings.tls_context()
        self._position = 0
        self._token: str | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._streams: set[WatchStream] = set()
        self._aborted = False
        self._answered: set[str] = set()
        """Endpoints that have ever answered."""

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._settings.endpoints[self._position]

    # ---- calls

    def range(
        self,
        keys: KeyRange,
        *,
        limit: int = 0,
        revision: int = 0,
        keys_only: bool = False,
        newest_first: bool = False,
    ) -> Page:
        """Keys of a range as of `revision` (0: now), in key order or by mod_revision, newest first.

        Raises `EtcdHistoryError` when the store cannot tell how it was at that revision.
        """
        body: dict[str, Any] = {"key": base64_of(keys.start), "range_end": base64_of(keys.end)}
        body |= {"limit": str(limit), "revision": str(revision), "keys_only": keys_only}
        if newest_first:
            body |= {"sort_order": "DESCEND", "sort_target": "MOD"}
        return page_of(self._call("kv/range", body, reading(keys)))

    def get(self, key: str) -> bytes | None:
        page = self.range(KeyRange(key.encode(), b""))
        return page.kvs[0].value if page.kvs else None

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write a key. Returns the revision that the store then has."""
        body = {"key": base64_of(key.encode()), "value": base64_of(value), "lease": str(lease)}
        answer = self._call("kv/put", body, f"write the key {key!a}")
        return int(answer["header"]["revision"])

    def delete(self, key: str) -> bool:
        """Delete a key. Whether there was one."""
        body = {"key": base64_of(key.encode())}
        answer = self._call("kv/deleterange", body, f"write the key {key!a}")
        return int(answer.get("deleted", 0)) > 0

    def transact(
        self,
        compare: Sequence[Mapping[str, Any]],
        success: Sequence[Mapping[str, Any]],
        *,
        doing: str = "read and write these keys",
    ) -> bool:
        """Do all of `success` if all of `compare` hold, otherwise nothing. See `mod_revision_is` & co.
        `doing` names the rights that it takes, for when they are missing."""
        answer = self._call("kv/txn", {"compare": list(compare), "success": list(success)}, doing)
        return bool(answer.get("succeeded", False))

    def compact(self, revision: int) -> None:
        self._call("kv/compaction", {"revision": str(revision)})

    def grant_lease(self, ttl: int) -> int:
        """A lease of `ttl` seconds (etcd may give more). Returns its ID."""
        return int(self._call("lease/grant", {"TTL": str(ttl)})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease. False when it is already gone."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", answer).get("TTL", 0)) > 0

    def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys. Nothing happens when it is already gone."""
        try:
            self._call("kv/lease/revoke", {"ID": str(lease)})
        except EtcdRefusedError as error:
            if "requested lease not found" not in str(error):
                raise

    def watch(self, keys: KeyRange, start_revision: int) -> WatchStream:
        """Events of a range from `start_revision` on, with the value before each.

        Returns once etcd has confirmed it. Raises `EtcdHistoryError` when the revision is gone.
        """
        return self._with_failover(
            lambda: self._with_token(lambda: self._open(keys, start_revision), reading(keys))
        )

    def forget_token(self) -> None:
        """Authenticate anew before the next call."""
        self._token = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abort(self) -> None:
        """From another thread: fail what is going on and everything after it."""
        self._aborted = True
        for stream in tuple(self._streams):
            stream.interrupt()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            _shut_down(connection.sock)

    # ---- one call over the current endpoint

    def _call(self, path: str, body: Mapping[str, Any], doing: str = "do this") -> dict[str, Any]:
        return self._with_failover(
            lambda: self._with_token(lambda: self._post(path, body, self._headers()), doing)
        )

    def _with_failover(self, attempt: Callable[[], T]) -> T:
        """Try every endpoint once, starting with the one that worked last."""
        failures = []
        for _ in self._settings.endpoints:
            try:
                return attempt()
            except (OSError, http.client.HTTPException, EtcdUnavailableError) as error:
                fault = connection_fault(
                    error, tls=self._tls is not None, answered=self.endpoint in self._answered
                )
                failures.append(f"{self.endpoint}: {fault}")
                self.close()
                self._token = None
                self._position = (self._position + 1) % len(self._settings.endpoints)
                if self._aborted:
                    break
        raise EtcdUnavailableError("; ".join(failures))

    def _with_token(self, attempt: Callable[[], T], doing: str) -> T:
        """An attempt whose refusal says in words what is refused."""
        try:
            return self._authenticated(attempt)
        except EtcdRefusedError as error:
            raise explained(error, self._settings.username, doing) from None

    def _authenticated(self, attempt: Callable[[], T]) -> T:
        """Authenticate where that is needed; once more when the token is no longer accepted."""
        if self._settings.username and self._token is None:
            self._token = self._authenticate()
        try:
            return attempt()
        except EtcdRefusedError as error:
            if not (self._settings.username and error.wants_token):
                raise
            self._token = self._authenticate()
            return attempt()

    def _authenticate(self) -> str:
        """A token; empty while etcd asks for no password at all."""
        body = {"name": self._settings.username, "password": self._settings.password}
        try:
            return str(self._post("auth/authenticate", body, {})["token"])
        except EtcdRefusedError as error:
            if error.code == _FAILED_PRECONDITION and "not enabled" in str(error):
                return ""
            raise

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """One request. A kept connection that the server has closed meanwhile is replaced once."""
        kept = self._connection is not None
        try:
            return self._exchange(path, body, headers)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not kept or self._aborted:
                raise
            return self._exchange(path, body, headers)

    def _exchange(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        if self._connection is None:
            self._connection = self._connect()
        try:
            response = _send(self._connection, path, body, headers)
            payload = response.read(_MAX_ANSWER_BYTES)
        except BaseException:
            self.close()  # whatever is still on the wire must not be read as the next answer
            raise
        self._answered.add(self.endpoint)
        return checked(response.status, payload)

    def _connect(self) -> http.client.HTTPConnection:
        if self._aborted:
            raise EtcdUnavailableError("the client was stopped")
        host, _, port = self.endpoint.rpartition(":")
        host = host.strip("[]")
        timeout = self._settings.request_timeout
        if self._tls is None:
            connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, int(port), timeout=timeout, context=self._tls)
        connection.connect()
        return connection

    # ---- watch

    def _open(self, keys: KeyRange, start_revision: int) -> WatchStream:
        request = {
            "key": base64_of(keys.start),
            "range_end": base64_of(keys.end),
            "start_revision": str(start_revision),
            "prev_kv": True,
            "progress_notify": True,
            "fragment": True,
        }
        # A member that lost its leader ends such a watch instead of keeping it mute.
        headers = self._headers() | {"Grpc-Metadata-hasleader": "true"}
        stream = WatchStream(self._connect(), self._streams)
        try:
            stream.open(request, headers)
        except BaseException:
            stream.close()
            raise
        if self._aborted:
            stream.close()
            raise EtcdUnavailableError("the client was stopped")
        return stream


class WatchStream:
    """An open watch on a connection of its own. Iterate over it in the thread that opened it."""

    def __init__(self, connection: http.client.HTTPConnection, streams: set[WatchStream]) -> None:
        self.connection = connection
        # Kept here because http.client lets go of it when a server announces to close.
        self._socket: socket.socket = connection.sock
        self._streams = streams
        self._response: http.client.HTTPResponse | None = None
        self._rest = bytearray()
        streams.add(self)

    def open(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self._response = _send(self.connection, "watch", {"create_request": request}, headers)
        if self._response.status != 200:
            checked(self._response.status, self._response.read(_MAX_ANSWER_BYTES))
        watch_answer_of(self._line())
        self._socket.settimeout(None)  # silence is normal; the heartbeat tells it from a dead server

    def __iter__(self) -> Iterator[WatchAnswer]:
        """Answers as they come; ends only by an `EtcdError`."""
        while True:
            yield watch_answer_of(self._line())

    def interrupt(self) -> None:
        """From another thread: the iteration ends with an error."""
        _shut_down(self._socket)

    def close(self) -> None:
        self._streams.discard(self)
        if self._response is not None:
            self._response.close()
        self.connection.close()

    def _line(self) -> bytes:
        assert self._response is not None  # noqa: S101 - opened before anything is read
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            piece = self._piece(self._response)
            if not piece:
                raise EtcdUnavailableError("the watch was closed")
            self._rest += piece
            if len(self._rest) > _MAX_ANSWER_BYTES:
                raise EtcdUnavailableError("a watch answer over the limit")
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    @staticmethod
    def _piece(response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(1 << 18)
        except (OSError, http.client.HTTPException) as error:
            raise EtcdUnavailableError(f"the watch broke: {described(error)}") from None


def _send(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    connection.request(
        "POST", f"/v3/{path}", orjson.dumps(body), {"Content-Type": "application/json", **headers}
    )
    return connection.getresponse()


def _shut_down(sock: socket.socket) -> None:
    """Wake up whoever reads from the socket; closing it is left to its owner."""
    with suppress(OSError):
        # Not SSLSocket's own: that one takes the TLS state away under the reader's hands.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
