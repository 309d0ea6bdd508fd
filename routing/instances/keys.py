"""From keys in etcd to inputs of the instance machine. Pure.

    [/<namespace>/]XLLM:DEFAULT:<name>  XLLM:PREFILL:…  XLLM:DECODE:…  XLLM:MIX:…    registrations
    [/<namespace>/]XLLM:LOADMETRICS:<name>                                           loads

All of them lie in one range that nothing else of interest lies in, so that one list and one watch see
them in the order in which they were written. Keys are compared as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from routing.instances.core import Deleted, Input, Registered, StoredLoad, StoredLoadDeleted
from routing.instances.model import InvalidValue, Registration, Role
from routing.instances.registration import (
    InvalidInputError,
    check_name,
    parse_load,
    parse_registration,
    show,
)

MAX_SHOWN_INVALID: Final = 100
_ROLE_PREFIXES: Final = {f"XLLM:{role}:": role for role in Role}
_LOAD_PREFIX: Final = "XLLM:LOADMETRICS:"
# The first and the last of the five prefixes in byte order. `XLLM:CACHE:` lies before, and is not ours.
_RANGE: Final = ("XLLM:DECODE:", "XLLM:PREFILL;")


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys from `start` up to, not including, `end`."""

    start: bytes
    end: bytes


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One key was written or deleted, in the order in which etcd says so."""

    key: bytes
    value: bytes | None
    """None: deleted."""
    mod_revision: int
    create_revision: int = 0
    previous: bytes | None = None
    """The value before, when known."""


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Names of keys under a namespace. Slashes around the namespace are trimmed; nothing left: none."""

    namespace: str = ""

    @property
    def prefix(self) -> str:
        trimmed = self.namespace.strip("/")
        return f"/{trimmed}/" if trimmed else ""

    @property
    def range(self) -> KeyRange:
        start, end = _RANGE
        return KeyRange((self.prefix + start).encode(), (self.prefix + end).encode())

    @property
    def loads(self) -> KeyRange:
        """The part of the range that holds loads."""
        start = self.load("").encode()
        return KeyRange(start, start[:-1] + b";")

    def registration(self, role: Role, name: str) -> str:
        return f"{self.prefix}XLLM:{role}:{name}"

    def load(self, name: str) -> str:
        return f"{self.prefix}{_LOAD_PREFIX}{name}"

    def split(self, key: bytes) -> tuple[Role | None, str] | None:
        """(role of a registration, or None for a load; name). None when the key is neither.

        Raises `InvalidInputError` when the name cannot be one.
        """
        try:
            text = key.decode()
        except UnicodeDecodeError:
            raise InvalidInputError("the key is not UTF-8") from None
        text = text.removeprefix(self.prefix)
        if text.startswith(_LOAD_PREFIX):
            return None, check_name(text.removeprefix(_LOAD_PREFIX))
        for prefix, role in _ROLE_PREFIXES.items():
            if text.startswith(prefix):
                return role, check_name(text.removeprefix(prefix))
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One live registration key."""

    revision: int
    registration: Registration


class KeyTable:
    """Follows the registration keys of every name, so that of two the newer counts.

    One caller at a time. A value that does not parse leaves everything as it was.
    """

    def __init__(self, names: KeyNames) -> None:
        self._names = names
        self._entries: dict[str, dict[bytes, _Entry]] = {}
        self._loads: dict[str, StoredLoad] = {}
        """What stands in etcd now, for the case that another registration of the name comes to count."""
        self._invalid: dict[bytes, InvalidValue] = {}
        self.invalid: tuple[InvalidValue, ...] = ()
        """Keys that are skipped now, the newest hundred, the newest last. Can be read by any thread."""
        self.invalid_total = 0
        """Values that were skipped since the start."""

    def inputs(self, events: Sequence[KeyEvent], *, listed: bool) -> list[Input]:
        """What the machine has to be told. After a listing, the order of events says nothing about
        what was written first, and loads can only be judged once their instances are known; the same
        goes for what was written in one transaction."""
        ours = [(event, *split) for event in events if (split := self._split(event)) is not None]
        ours.sort(key=lambda one: (0 if listed else one[0].mod_revision, one[1] is None))
        if listed:
            # A listing stands together: all of it is known before anybody asks which registration of a name
            # counts. A store that was restored tells of lower revisions than those that are remembered.
            for event, role, name in ours:
                self._take(event, role, name)
        found: list[Input] = []
        for event, role, name in ours:
            if not listed:
                self._take(event, role, name)
            found += self._told(event, role, name)
        self.invalid = tuple(self._invalid.values())[-MAX_SHOWN_INVALID:]
        return found

    def _split(self, event: KeyEvent) -> tuple[Role | None, str] | None:
        """See `KeyNames.split`; None for a name that cannot be one as well."""
        try:
            return self._names.split(event.key)
        except InvalidInputError as error:
            self._note(event, error)
            return None

    def _take(self, event: KeyEvent, role: Role | None, name: str) -> None:
        """Remember a registration, if that is what was written, and it is valid."""
        if role is None or event.value is None:
            return
        try:
            registration = parse_registration(name, event.value, role)
        except InvalidInputError as error:
            self._note(event, error)
            return
        self._invalid.pop(event.key, None)
        self._entries.setdefault(name, {})[event.key] = _Entry(event.mod_revision, registration)

    def _told(self, event: KeyEvent, role: Role | None, name: str) -> Iterable[Input]:
        """What an event means to the machine, once it has been taken."""
        if role is None:
            return self._load(event, name)
        return self._gone(event, role, name) if event.value is None else self._registered(event, name)

    def _registered(self, event: KeyEvent, name: str) -> Iterable[Input]:
        """What was written, if it was valid and counts under its name."""
        entries = self._entries.get(name, {})
        entry = entries.get(event.key)
        if entry is None or entry.revision != event.mod_revision or _newest(entries) != event.key:
            return ()
        return (Registered(entry.registration, entry.revision, event.key.decode()),)

    def _gone(self, event: KeyEvent, role: Role, name: str) -> Iterable[Input]:
        self._invalid.pop(event.key, None)
        entries = self._entries.get(name, {})
        counted = bool(entries) and _newest(entries) == event.key
        entry = entries.pop(event.key, None)
        if entries:
            # The name still stands under another prefix; what was deleted had been overtaken by it,
            # unless it is the other that now counts again.
            if not counted:
                return ()
            key = _newest(entries)
            left = entries[key]
            back = Registered(left.registration, left.revision, key.decode())
            return (back, self._loads[name]) if name in self._loads else (back,)
        self._entries.pop(name, None)
        if entry is None:
            return ()
        return (Deleted(name, _identity(event, role, name) or entry.registration.identity),)

    def _load(self, event: KeyEvent, name: str) -> Iterable[Input]:
        if event.value is None:
            self._invalid.pop(event.key, None)
            self._loads.pop(name, None)
            return (StoredLoadDeleted(name),)
        try:
            report = parse_load(event.value)
        except InvalidInputError as error:
            self._note(event, error)
            return ()
        self._invalid.pop(event.key, None)
        load = self._loads[name] = StoredLoad(name, report, event.mod_revision)
        return (load,)

    def _note(self, event: KeyEvent, error: InvalidInputError) -> None:
        if event.value is None:
            self._invalid.pop(event.key, None)
            return
        key = show(event.key.decode(errors="backslashreplace"))[1:-1]
        self._invalid.pop(event.key, None)
        self._invalid[event.key] = InvalidValue(key, str(error), event.mod_revision)
        self.invalid_total += 1


def _newest(entries: dict[bytes, _Entry]) -> bytes:
    return max(entries, key=lambda key: entries[key].revision)


def _identity(event: KeyEvent, role: Role, name: str) -> str | None:
    """Whose registration was deleted, as far as the value before tells."""
    if event.previous is None:
        return None
    try:
        return parse_registration(name, event.previous, role).identity
    except InvalidInputError:
        return None
