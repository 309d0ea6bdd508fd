"""What the admin may ask of the running portal, and the place where the portal offers itself.

The admin pages belong to the streams app, which must not import the process that serves it. That
process installs a `Console` when it starts; anywhere else (a management command, a process that
serves pages only) the `DetachedConsole` answers.
"""

from __future__ import annotations

from typing import Any, Protocol

from streams.models import ResyncRequest
from streams.resync import ResyncOrder
from streams.spec import StreamId
from streams.status import StreamStatus


class Console(Protocol):
    """The running portal, as the admin sees it. Called on any thread."""

    def statuses(self) -> tuple[StreamStatus, ...] | None:
        """The streams now; None where this process follows none."""

    def followed(self) -> frozenset[StreamId] | None:
        """The streams that this replica follows or another one that is running, as it wrote some seconds
        ago; None where that is not known."""

    def series(self, stream: StreamId) -> dict[str, list[float | None]] | None:
        """What a stream did in the last minutes, column by column; None where nothing is known."""

    def explore(self, prompt: bytes) -> dict[str, Any] | None:
        """What every stream holds of a prompt (packed little-endian uint32), block by block; None where
        this process has no index."""

    def order_resync(self, order: ResyncOrder) -> int:
        """Pass an order on to every replica; how many streams of this one it concerns."""


class DetachedConsole:
    """No streams here: orders are left in the database, where the serving replicas find them."""

    def statuses(self) -> None:
        return None

    def followed(self) -> None:
        return None

    def series(self, stream: StreamId) -> None:
        return None

    def explore(self, prompt: bytes) -> None:
        return None

    def order_resync(self, order: ResyncOrder) -> int:
        ResyncRequest.record(order)
        return 0


_DETACHED = DetachedConsole()
_installed: Console = _DETACHED


def install(new: Console | None) -> None:
    """Offer the running portal to the admin; None takes it back."""
    global _installed
    _installed = _DETACHED if new is None else new


def console() -> Console:
    """The console to ask now; never kept, because it changes when the portal starts and stops."""
    return _installed
