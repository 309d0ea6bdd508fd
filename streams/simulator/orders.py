"""Faults on demand: the names and parameters that a running engine's control channel takes.

An order comes as a JSON object, `{"fault": name, …parameters}`. `take_order` checks it completely before
anything happens; a wrong one raises `OrderError` with a sentence that names the field and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from streams.simulator import faults
from streams.simulator.engine import SimulatedEngine
from streams.simulator.load import LoadModel

HEALTH_MODES = ("ok", "error", "hang")
"""`/health` answers 200, answers 503, or does not answer."""


class OrderError(ValueError):
    """An order that cannot be carried out."""


class Target(Protocol):
    """What orders act upon."""

    engine: SimulatedEngine
    load: LoadModel
    health: str
    heartbeats: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its type, its default, and what is allowed. With a default of None, null is allowed."""

    kind: type
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """What is allowed, for messages."""
        null = " or null" if self.default is None else ""
        if self.choices:
            return f"one of {', '.join(self.choices)}{null}"
        names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
        bounds = "" if self.least is None else f" from {self.least:g}"
        bounds += "" if self.most is None else f" to {self.most:g}"
        return names[self.kind] + bounds + null

    def accepts(self, value: Any) -> bool:
        """Whether `value`, as JSON gave it, is allowed."""
        if value is None:
            return self.default is None
        if isinstance(value, bool) != (self.kind is bool):
            return False
        if not isinstance(value, (int, float) if self.kind is float else self.kind):
            return False
        return value in self.choices if self.choices else self._in_bounds(value)

    def _in_bounds(self, value: Any) -> bool:
        above = self.least is None or value >= self.least
        return bool(above and (self.most is None or value <= self.most))


Action = Callable[[Target, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Order:
    """One thing that can be ordered."""

    help: str
    act: Action
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


_RANK = Parameter(int, None, "one rank; null: all", least=0)
_COUNT = Parameter(int, 1, "how many", least=1, most=1_000_000)


def _snapshots(target: Target, given: Mapping[str, Any]) -> None:
    kind = given["kind"]
    adjusted: dict[str, Callable[[], faults.SnapshotFault | None]] = {
        "slow": lambda: faults.slow(given["delay_s"]),
        "stale": lambda: faults.stale(given["behind"]),
        "oversized": lambda: faults.oversized(given["bytes"]),
        "good": lambda: None,
    }
    fault = adjusted[kind]() if kind in adjusted else faults.SNAPSHOT_FAULTS[kind]
    target.engine.spoil_snapshots(fault, given["times"], rank=given["rank"])


def _clear(target: Target, given: Mapping[str, Any]) -> None:
    for rank in target.engine.chosen(given["rank"]):
        rank.clear()


def _drop_connection(target: Target, given: Mapping[str, Any]) -> None:
    if not (given["live"] or given["replay"]):
        raise OrderError("live, replay: both are false; at least one must be true")
    target.engine.drop_connection(**given, wait=False)


ORDERS: Mapping[str, Order] = {
    "skip_sequence": Order(
        "leave out sequence numbers: a gap that shows with the next message",
        lambda target, given: target.engine.skip_sequence(given["count"], rank=given["rank"]),
        {"count": _COUNT, "rank": _RANK},
    ),
    "lose_messages": Order(
        "change the cache and count the messages, but do not send them",
        lambda target, given: target.engine.lose_messages(given["count"], rank=given["rank"]),
        {"count": Parameter(int, 1, "how many", least=1, most=10_000), "rank": _RANK},
    ),
    "drop_connection": Order(
        "close sockets and bind the same ports again",
        _drop_connection,
        {
            "live": Parameter(bool, True, "the live socket"),
            "replay": Parameter(bool, True, "the snapshot socket"),
            "down_s": Parameter(float, 0.0, "seconds to stay away", least=0, most=3600),
            "rank": _RANK,
        },
    ),
    "snapshots": Order(
        "spoil the answers to snapshot requests",
        _snapshots,
        {
            "kind": Parameter(
                str, "silent", "what is wrong with them", choices=("good", *faults.SNAPSHOT_FAULTS)
            ),
            "times": Parameter(int, None, "for how many answers; null: until `good`", least=1),
            "delay_s": Parameter(float, 3.0, "for `slow`: seconds per frame set", least=0, most=600),
            "behind": Parameter(int, 10, "for `stale`: messages", least=1),
            "bytes": Parameter(
                int, faults.OVERSIZED_BYTES, "for `oversized`: size of the padding", least=1, most=2**30
            ),
            "rank": _RANK,
        },
    ),
    "malformed": Order(
        "send one malformed or foreign live message",
        lambda target, given: target.engine.send_malformed(given["kind"], rank=given["rank"]),
        {
            "kind": Parameter(str, "random", "what is wrong with it", choices=tuple(faults.LIVE_FAULTS)),
            "rank": _RANK,
        },
    ),
    "restart": Order(
        "continue as another process with other content, its sequence back at the start",
        lambda target, given: target.engine.restart(visible=given["visible"]),
        {"visible": Parameter(bool, True, "drop the connections; false: go on with the same sockets")},
    ),
    "clear": Order("publish AllBlocksCleared", _clear, {"rank": _RANK}),
    "flood": Order(
        "send messages at full speed; they leave the cache as it is",
        lambda target, given: target.engine.flood(given["messages"], rank=given["rank"], wait=False),
        {
            "messages": Parameter(int, 100_000, "how many", least=1, most=10_000_000),
            "rank": _RANK,
        },
    ),
    "rate": Order(
        "change the traffic",
        lambda target, given: target.engine.set_rate(given["events_per_second"]),
        {"events_per_second": Parameter(float, 50.0, "0 pauses it", least=0, most=1_000_000)},
    ),
    "health": Order(
        "change what /health does",
        lambda target, given: setattr(target, "health", given["mode"]),
        {"mode": Parameter(str, "error", "200, 503, or no answer", choices=HEALTH_MODES)},
    ),
    "heartbeats": Order(
        "stop or resume heartbeats and lease renewals",
        lambda target, given: setattr(target, "heartbeats", given["enabled"]),
        {"enabled": Parameter(bool, False, "true resumes them")},
    ),
    "load": Order(
        "pin the queue length that heartbeats report",
        lambda target, given: setattr(target.load, "fixed_waiting", given["waiting_requests_num"]),
        {"waiting_requests_num": Parameter(int, None, "null: let it wander again", least=0, most=10**9)},
    ),
}
"""Everything that can be ordered, by name."""


def take_order(target: Target, order: object) -> dict[str, Any]:
    """Check an order, carry it out, and return it with its defaults filled in."""
    if not isinstance(order, dict):
        raise OrderError('the order must be a JSON object such as {"fault": "skip_sequence"}')
    name = order.get("fault")
    if not isinstance(name, str) or name not in ORDERS:
        raise OrderError(f"fault: found {name!r}; allowed: {', '.join(ORDERS)}")
    given = _checked(name, {key: value for key, value in order.items() if key != "fault"})
    rank, ranks = given.get("rank"), len(target.engine.ranks)
    if rank is not None and rank >= ranks:
        raise OrderError(f"rank: found {rank}; this engine has ranks 0 to {ranks - 1}")
    ORDERS[name].act(target, given)
    return {"fault": name, **given}


def _checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = ORDERS[name].parameters
    for key in given:
        if key not in parameters:
            allowed = ", ".join(parameters) or "no parameters"
            raise OrderError(f"{key}: unknown for {name}; allowed: {allowed}")
    checked = {key: given.get(key, parameter.default) for key, parameter in parameters.items()}
    for key, value in checked.items():
        if not parameters[key].accepts(value):
            raise OrderError(f"{key}: found {value!r}; allowed: {parameters[key].describe()}")
    return checked


def catalogue() -> list[dict[str, Any]]:
    """All orders as JSON, for people who ask the control channel what it can do."""
    return [
        {
            "fault": name,
            "help": order.help,
            "parameters": {
                key: {"default": each.default, "allowed": each.describe(), "help": each.help}
                for key, each in order.parameters.items()
            },
        }
        for name, order in ORDERS.items()
    ]
