"""A registry and an index that hold still, for tests of the shell around the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from routing.instances.model import InstanceView, Role, Snapshot
from streams.status import Match
from tests.routing.builders import snapshot


class FixedRegistry:
    """Has the instances it was given until it is given others."""

    def __init__(self, *instances: InstanceView) -> None:
        self._snapshot = Snapshot()
        self.set(*instances)

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def set(self, *instances: InstanceView) -> None:
        self._snapshot = snapshot(*instances, topology=self._snapshot.topology_version + 1)

    def set_current_role(self, name: str, identity: str | None, role: Role) -> bool:
        view = self._snapshot.by_name.get(name)
        if view is None or view.identity != identity:
            return False
        flipped = replace(view, current_role=role)
        self.set(*(flipped if other is view else other for other in self._snapshot.instances))
        return True

    def role(self, name: str) -> str:
        return self._snapshot.by_name[name].current_role


@dataclass
class FixedIndex:
    """Answers every query with the same matches, or fails."""

    matches: Sequence[Match] = ()
    failure: Exception | None = None
    prompts: list[bytes] = field(default_factory=list)

    def query(self, prompt: bytes) -> Sequence[Match]:
        self.prompts.append(prompt)
        if self.failure is not None:
            raise self.failure
        return self.matches


@dataclass
class CountingMetrics:
    decisions: list[tuple[str, str]] = field(default_factory=list)
    errors: list[tuple[str, int]] = field(default_factory=list)

    def observe_decision(self, policy: str, outcome: str) -> None:
        self.decisions.append((policy, outcome))

    def observe_prediction_error(self, instance_name: str, tokens: int) -> None:
        self.errors.append((instance_name, tokens))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
