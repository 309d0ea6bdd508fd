"""Host names → addresses, without holding up anybody else.

A name that resolves slowly (a DNS outage) must cost only those who need that name. libzmq resolves in
the one thread that moves all its bytes, and `getaddrinfo` cannot be interrupted, so each pending name has a
daemon thread of its own; whoever asks for the same name meanwhile shares the answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

MAX_PENDING = 512
"""Names being resolved at once; more are refused, since each costs a thread."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Numeric addresses in order of preference, or why there are none."""

    addresses: tuple[str, ...] = ()
    error: str | None = None

    def choose(self, attempt: int) -> str:
        """Another address with every attempt: the engine may listen on one of them only."""
        return self.addresses[attempt % len(self.addresses)]


Done = Callable[[Resolved], None]


def is_numeric(host: str) -> bool:
    """Whether a host (IPv6 without brackets) needs no resolving."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class Resolver:
    """Resolves names in the background. Thread-safe."""

    def __init__(self, lookup: Callable[[str], tuple[str, ...]] | None = None) -> None:
        self._lookup = lookup or look_up
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Done]] = {}

    def resolve(self, host: str, done: Done) -> None:
        """Call `done` once with the answer: at once for an address, later from another thread for a name."""
        if is_numeric(host):
            done(Resolved((host,)))
            return
        with self._lock:
            waiting = self._waiting.get(host)
            if waiting is not None:
                waiting.append(done)
                return
            full = len(self._waiting) >= MAX_PENDING
            if not full:
                self._waiting[host] = [done]
        if full:
            done(Resolved(error=f"more than {MAX_PENDING} names are being resolved already"))
            return
        try:
            threading.Thread(target=self._run, args=(host,), name=f"resolve {host}", daemon=True).start()
        except RuntimeError as error:  # The system has no thread for us.
            self._answer(host, Resolved(error=str(error)))

    def _run(self, host: str) -> None:
        try:
            answer = Resolved(self._lookup(host))
        except (OSError, ValueError) as error:
            answer = Resolved(error=getattr(error, "strerror", None) or str(error))
        self._answer(host, answer)

    def _answer(self, host: str, answer: Resolved) -> None:
        with self._lock:
            waiting = self._waiting.pop(host)
        for done in waiting:
            done(answer)


def look_up(host: str) -> tuple[str, ...]:
    """The addresses of a name, as the system orders them. Blocks; raises OSError or ValueError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
