"""What is wrong with a configuration: every fault, each on a line of its own.

A reader of the configuration never stops at the first fault: it adds each to a `Faults` list and
goes on with the default, and the caller raises once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SHOWN_CHARACTERS = 200
"""Longest quoted value in a fault: a path in whole, and enough of anything to recognise a typing error by."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: where, what was found there, what is allowed instead."""

    where: str
    found: str
    allowed: str

    def __str__(self) -> str:
        line = f"{self.where}: found {self.found}; allowed: {self.allowed}"
        return " ".join(line.splitlines())


class ConfigError(Exception):
    """The configuration has faults. `str()` is one line for each."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class SettingsError(ConfigError):
    """The faults are in what Django's settings need, so that no command can run at all."""


class Faults(list[Fault]):
    """Collects faults while a configuration is read."""

    def note(self, where: str, found: str, allowed: str) -> None:
        self.append(Fault(where, found, allowed))

    def raise_if_any(self, kind: type[ConfigError] = ConfigError) -> None:
        """Raises an error of this kind with everything that was collected."""
        if self:
            raise kind(self)


def show(value: object) -> str:
    """`value` as a short one-line quotation for a fault."""
    text = repr(value)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}… ({len(text):,} characters)"
    return text
