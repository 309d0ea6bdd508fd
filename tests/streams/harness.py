"""What the tests of live streams share: a portal that is only asked and told, and a vocabulary of blocks.

Blocks are numbered. Block `n` has the hash `1000 + n` and its own token IDs, so `text(1, 2, 3)` is a prompt
of three blocks and `store(1, 2, 3)` the event with which an engine announces them.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from streams.directory import Directory
from streams.resolver import Resolver
from streams.simulator import Truth
from streams.simulator.messages import Event, block_removed, block_stored, host_copy
from streams.spec import Limits, StreamSpec
from streams.status import Match, StreamChange, StreamState, StreamStatus
from tests.support.waiting import wait_until

SIZE = 4
"""Tokens per block of the numbered blocks."""
TIMEOUT = 20.0
"""Seconds; only a failing test waits that long."""


def hash_of(block: int) -> int:
    return 1000 + block


def text(*blocks: int, size: int = SIZE) -> list[int]:
    """Token IDs of these blocks, one after the other."""
    return [block * 100 + position for block in blocks for position in range(size)]


def store(*blocks: int, parent: int | None = None, medium: str | None = "gpu", **fields: Any) -> Event:
    """`BlockStored` of a chain of numbered blocks with their tokens."""
    return block_stored(
        [hash_of(block) for block in blocks],
        None if parent is None else hash_of(parent),
        text(*blocks),
        SIZE,
        medium,
        **fields,
    )


def copy(*blocks: int, medium: str = "cpu", **fields: Any) -> Event:
    """A tokenless `BlockStored`: copies of known blocks."""
    return host_copy([hash_of(block) for block in blocks], medium, **fields)


def remove(*blocks: int, medium: str | None = "gpu", **fields: Any) -> Event:
    return block_removed([hash_of(block) for block in blocks], medium, **fields)


def packed(token_ids: Iterable[int]) -> bytes:
    return array("I", token_ids).tobytes()


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Portal:
    """A real `Directory` with what it reported. Streams are named by their spec."""

    def __init__(
        self, limits: Limits | None = None, resolver: Resolver | None = None, **settings: int
    ) -> None:
        self.changes: list[StreamChange] = []
        self.limits = limits or Limits(**settings)
        self.directory = Directory(self.limits, on_change=self.changes.append, resolver=resolver, seed=7)
        self.directory.start()

    def follow(self, *specs: StreamSpec) -> None:
        self.directory.set_desired(specs)

    def follow_synchronized(self, *specs: StreamSpec) -> None:
        """Follow, and wait until each has its first snapshot in service."""
        self.follow(*specs)
        for spec in specs:
            self.wait_synchronized(spec)

    def close(self) -> None:
        self.directory.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- asking ---------------------------------------------------------------------------------------

    def status(self, spec: StreamSpec) -> StreamStatus:
        return next(status for status in self.directory.statuses() if status.spec == spec)

    def counter(self, spec: StreamSpec, name: str) -> int:
        return self.status(spec).counters.get(name, 0)

    def resyncs(self, spec: StreamSpec) -> dict[str, int]:
        """Snapshot requests by reason."""
        counters = self.status(spec).counters
        return {key.partition(":")[2]: n for key, n in counters.items() if key.startswith("resyncs:")}

    def match(self, spec: StreamSpec, token_ids: Iterable[int]) -> Match:
        matches = self.directory.query(packed(token_ids))
        return next(match for match in matches if match.spec == spec)

    def hits(self, spec: StreamSpec, token_ids: Iterable[int]) -> tuple[int, int]:
        """`(device_hit_tokens, host_only_hit_tokens)`."""
        match = self.match(spec, token_ids)
        return match.device_hit_tokens, match.host_only_hit_tokens

    def holds(self, spec: StreamSpec, *blocks: int) -> tuple[int, int]:
        """How many leading ones of the numbered blocks: on Device, on Host alone."""
        device, host = self.hits(spec, text(*blocks))
        return device // SIZE, host // SIZE

    def losses(self, spec: StreamSpec) -> list[str]:
        """Codes of the faults for which the stream left `synchronized`, in order."""
        return [
            change.fault.code
            for change in self.changes
            if change.spec == spec and change.old is StreamState.SYNCHRONIZED and change.fault
        ]

    def errors(self, spec: StreamSpec) -> list[str]:
        """Every fault that was shown, as `code: sentence`, in order."""
        return [str(change.fault) for change in self.changes if change.spec == spec and change.fault]

    # -- waiting --------------------------------------------------------------------------------------

    def wait(self, spec: StreamSpec, condition: Callable[[StreamStatus], object], what: str) -> StreamStatus:
        """The first status that meets the condition."""
        last: list[StreamStatus] = []

        def met() -> StreamStatus | None:
            last[:] = [self.status(spec)]
            return last[0] if condition(last[0]) else None

        status = wait_until(met, TIMEOUT, lambda: f"not seen: {what}; last {last[0]}\n{self.changes[-8:]}")
        assert status is not None
        return status

    def wait_state(self, spec: StreamSpec, state: StreamState) -> StreamStatus:
        return self.wait(spec, lambda status: status.state is state, f"state {state}")

    def wait_synchronized(self, spec: StreamSpec) -> StreamStatus:
        return self.wait_state(spec, StreamState.SYNCHRONIZED)

    def wait_sequence(self, spec: StreamSpec, sequence: int) -> StreamStatus:
        """Wait until the serving view has arrived exactly there."""
        return self.wait(spec, lambda status: status.sequence == sequence, f"message {sequence} in service")

    def wait_snapshots(self, spec: StreamSpec, count: int) -> StreamStatus:
        """Wait until that many snapshots have been put in service since the stream was created."""
        return self.wait(
            spec,
            lambda status: status.last_snapshot and status.last_snapshot.count >= count,
            f"{count} snapshots",
        )

    def wait_counter(self, spec: StreamSpec, name: str, least: int) -> StreamStatus:
        return self.wait(
            spec, lambda status: status.counters.get(name, 0) >= least, f"counter {name} at {least}"
        )

    def wait_error(self, spec: StreamSpec, code: str) -> str:
        """Wait until the history holds a fault of this code; returns it as `code: sentence`."""
        return wait_until(
            lambda: next((each for each in self.errors(spec) if each.startswith(f"{code}:")), ""),
            TIMEOUT,
            lambda: f"no {code} among {self.errors(spec)}",
        )

    def wait_warning(self, spec: StreamSpec, code: str) -> str:
        """Wait until the stream shows this warning; returns its sentence."""
        status = self.wait(spec, lambda status: status.warning and status.warning.code == code, code)
        assert status.warning is not None
        return status.warning.sentence

    def wait_losses(self, spec: StreamSpec, count: int) -> list[str]:
        return wait_until(
            lambda: self.losses(spec) if len(self.losses(spec)) >= count else [],
            TIMEOUT,
            lambda: f"{count} losses of sync expected, seen: {self.losses(spec)}",
        )

    # -- comparing ------------------------------------------------------------------------------------

    def wait_holds(self, spec: StreamSpec, blocks: Sequence[int], expected: tuple[int, int]) -> None:
        wait_until(
            lambda: self.holds(spec, *blocks) == expected,
            TIMEOUT,
            lambda: f"{blocks}: {expected} expected, {self.holds(spec, *blocks)} held; {self.status(spec)}",
        )

    def wait_equals(self, spec: StreamSpec, truth: Callable[[], Truth]) -> None:
        """Wait until every prompt that a resting engine remembers is answered as the engine would."""
        wait_until(
            lambda: not self.differences(spec, truth()),
            TIMEOUT,
            lambda: f"{self.differences(spec, truth())[:5]}; {self.status(spec)}",
        )

    def differences(
        self, spec: StreamSpec, truth: Truth
    ) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        """(number of the prompt, the engine's truth, our answer) where the two differ."""
        compared = ((truth.hits(prompt), self.hits(spec, prompt)) for prompt in truth.prompts())
        return [(i, true, ours) for i, (true, ours) in enumerate(compared) if true != ours]
