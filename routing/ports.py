"""What routing needs from the rest of the portal, as seen from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from routing.instances.model import Role, Snapshot
from streams.status import Match


class Registry(Protocol):
    """Who is there (`routing.instances.registry`)."""

    def snapshot(self) -> Snapshot:
        """The current instances; cheap, never waits."""

    def set_current_role(self, name: str, identity: str | None, role: Role) -> bool:
        """Flip a MIX instance; the next snapshot has it. False: that life is over."""


class Index(Protocol):
    """The part of the directory that answers queries."""

    def query(self, prompt: bytes) -> Sequence[Match]:
        """Matches in (instance, rank) order; token IDs as packed little-endian uint32."""


class RoutingMetrics(Protocol):
    """Is told what happens. Must not block."""

    def observe_decision(self, policy: str, outcome: str) -> None: ...

    def observe_prediction_error(self, instance_name: str, tokens: int) -> None:
        """Predicted minus reported."""


class _NullMetrics:
    def observe_decision(self, policy: str, outcome: str) -> None:
        """Nobody counts."""

    def observe_prediction_error(self, instance_name: str, tokens: int) -> None:
        """Nobody counts."""


NULL_METRICS: Final = _NullMetrics()
