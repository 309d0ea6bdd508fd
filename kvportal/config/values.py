"""Texts from flags and variables, turned into values: what each kind allows, in words and in code."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvportal.config.faults import Faults, show

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?[0-9]+")
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of value. `parse` raises ValueError for a text that is not allowed."""

    allowed: str
    parse: Callable[[str], T]
    secret: bool = False
    """The text is never quoted in a fault."""

    def read(self, where: str, text: str, faults: Faults, default: T) -> T:
        """The value of `text`, or a fault and `default`."""
        try:
            return self.parse(text.strip())
        except ValueError:
            found = "a value (not shown, it is a secret)" if self.secret else show(text)
            faults.note(where, found, self.allowed)
            return default


def integer(low: int, high: int | None = None) -> Kind[int]:
    """A decimal integer from `low` to `high` (without bound when None)."""

    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text) or len(text) > 20:
            raise ValueError
        return checked(int(text), low, high)

    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    return Kind(allowed, parse)


def number(low: float, high: float | None = None, *, above: bool = False) -> Kind[float]:
    """A finite number from `low` (or above it) to `high` (without bound when None)."""

    def parse(text: str) -> float:
        value = checked(float(text), low, high)
        if not math.isfinite(value) or not text.isascii() or "_" in text or (above and value == low):
            raise ValueError
        return value

    if high is not None:
        return Kind(f"a number from {low:g} to {high:g}", parse)
    return Kind(f"a finite number {'above' if above else 'of at least'} {low:g}", parse)


def spelled(value: object) -> str:
    """A value as one would type it; empty for those that mean "none"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(spelled, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def checked(value: T, low: T, high: T | None) -> T:
    """`value` when it lies in the closed range; ValueError otherwise, for NaN as well."""
    if not low <= value or (high is not None and not value <= high):  # type: ignore[operator]
        raise ValueError
    return value


def choice(*names: str) -> Kind[str]:
    """One of `names`, spelled exactly."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Kind(" or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0], parse)


def boolean() -> Kind[bool]:
    """A switch."""

    def parse(text: str) -> bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError

    return Kind("true or false (also 1/0, yes/no, on/off)", parse)


def text_of(allowed: str = "any text", *, secret: bool = False) -> Kind[str]:
    """Any text."""
    return Kind(allowed, lambda text: text, secret)


def names(allowed: str, accept: Callable[[str], bool] = bool) -> Kind[tuple[str, ...]]:
    """Comma-separated texts, at least one, none of them empty, each of which `accept` takes."""

    def parse(text: str) -> tuple[str, ...]:
        entries = tuple(entry.strip() for entry in text.split(","))
        if not all(entry and accept(entry) for entry in entries):
            raise ValueError
        return entries

    return Kind(allowed, parse)


def is_host(host: str) -> bool:
    """Whether `host` (IPv6 without brackets) is an address or could be a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # A name that ends in a number is an address in a form that resolvers still take: 0x0 is 0.0.0.0.
        numeric = _NUMERIC_LABEL.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None
        return not numeric and len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
    return True


def is_loopback(host: str) -> bool:
    """Whether a server on `host` can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES
