"""ZeroMQ endpoints that a subscriber can connect to."""

from __future__ import annotations

import ipaddress
import re

from kvportal.config.values import is_host

_ENDPOINT = re.compile(r"tcp://(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})")
ALLOWED = "tcp://host:port with a host to connect to (not *, 0.0.0.0 or [::]) and a port from 1 to 65535"


def endpoint_key(endpoint: str) -> tuple[str, int]:
    """(host, port) of `endpoint`, the same for every spelling of one address.

    Raises ValueError with what is wrong when nothing can connect to it.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ValueError("not tcp://host:port")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port}")
    if match["v6"] is not None:
        return _address(match["v6"], version=6), port
    host = match["host"]
    if host == "*":
        raise ValueError("a wildcard, for binding only")
    if not is_host(host):
        raise ValueError("no valid host")
    try:
        return _address(host, version=4), port
    except ipaddress.AddressValueError:
        return host.lower().rstrip("."), port


def _address(text: str, *, version: int) -> str:
    """The canonical form of an address; AddressValueError when it is none."""
    address = ipaddress.IPv6Address(text) if version == 6 else ipaddress.IPv4Address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if (mapped or address).is_unspecified:
        raise ValueError("a wildcard, for binding only")
    return str(address)
