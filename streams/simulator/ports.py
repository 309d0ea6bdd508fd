"""Free TCP ports in a row, for engines whose ranks listen on consecutive ports."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_ATTEMPTS = 200


def free_ports(host: str, count: int) -> int:
    """First of `count` consecutive ports that are free now on `host` (a literal address).

    Somebody may take one before the caller does: bind, and ask again when that fails.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_ATTEMPTS):
        with ExitStack() as held:
            first = held.enter_context(_bound(family, host, 0)).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    held.enter_context(_bound(family, host, port))
            except (OSError, OverflowError):
                continue
            return int(first)
    raise OSError(f"no {count} consecutive free ports on {host}")


def _bound(family: int, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
