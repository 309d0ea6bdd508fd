"""The listening socket, opened before anything else starts, so that a busy port is said at once."""

from __future__ import annotations

import errno
import socket

BACKLOG = 1024

_REASONS = {
    errno.EADDRINUSE: "another process already listens there; stop it, or choose another --http-server-port",
    errno.EACCES: "ports below 1024 need a privilege; choose another --http-server-port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --server-host",
}


class ListenError(Exception):
    """The address cannot be listened on; the sentence says why and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking TCP socket that listens on `host` (IPv4, IPv6 without brackets, or a name).

    `::` takes IPv4 as well where the system has both.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        message = f"cannot listen on {url(host, port)}: the name does not resolve ({error.strerror})"
        raise ListenError(message) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise ListenError(f"cannot listen on {url(host, port)}: {reason}") from None
    listener.setblocking(False)
    return listener


def listening_url(listener: socket.socket) -> str:
    """Where `listener` can be reached, with the port that the system may have chosen."""
    host, port = listener.getsockname()[:2]
    return url(host, port)


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
