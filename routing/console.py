"""What the admin may ask of the running portal about instances and decisions; it offers itself here.

The admin belongs to the routing app, which must not import the process that serves it. That process
installs itself when it starts and takes itself back when it stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from routing.decision_log import DecisionLog
from routing.instances.model import Snapshot, SourceStatus
from routing.selector import Selector
from streams.status import Fault


class Console(Protocol):
    """The running portal's instances and decisions. Called on any thread."""

    @property
    def decisions(self) -> DecisionLog:
        """The decisions that are still in memory."""

    @property
    def selector(self) -> Selector:
        """Which weights are in force, and how its predictions turned out."""

    def snapshot(self) -> Snapshot: ...
    def status(self) -> SourceStatus: ...
    def exclusions(self) -> Mapping[str, Fault]:
        """Why instances are not followed, by name."""

    def reload_entered(self) -> None:
        """The instances entered in the admin changed."""


_installed: Console | None = None


def install(new: Console | None) -> None:
    """Offer the running portal to the admin; None takes it back."""
    global _installed
    _installed = new


def console() -> Console | None:
    """None where no portal runs in this process."""
    return _installed
