"""The faults that a stream's owner notices, in words. Pure.

Faults in the bytes themselves say what they are (`core.errors`); docs/protocol.md lists all codes.
"""

from __future__ import annotations

from streams.sockets import cut_bytes
from streams.spec import Limits, StreamSpec
from streams.status import Fault, StreamState

WAITING = {
    StreamState.CONNECTING: Fault("connecting", "the engine's live channel is not connected yet"),
    StreamState.SYNCING: Fault("syncing", "the first snapshot is on its way"),
}
"""Why a stream that nothing has happened to yet does not serve."""
UNEXPLAINED = Fault("unsynchronized", "no snapshot is in service")
NO_SLOT = Fault("no_slot", "waiting for a free slot of the index")


def live_lost(spec: StreamSpec, limits: Limits) -> Fault:
    cut = cut_bytes(limits.max_message_bytes)
    return Fault(
        "disconnected",
        f"the connection to {spec.endpoint} was lost; unless the engine went away, it may have "
        f"sent a message over {cut} bytes (twice max_message_bytes)",
    )


def live_refused(spec: StreamSpec) -> Fault:
    return Fault("connect_failed", f"{spec.endpoint} accepts no connection; trying again")


def live_rejected(spec: StreamSpec) -> Fault:
    return Fault(
        "connect_failed",
        f"what answers at {spec.endpoint} is not an engine's live channel, or hangs up; trying again",
    )


def unresolved(endpoint: str, reason: str) -> Fault:
    return Fault("resolve_failed", f"no address is known for {endpoint}: {reason}")


def replay_lost(spec: StreamSpec, limits: Limits) -> Fault:
    cut = cut_bytes(limits.max_message_bytes)
    return Fault(
        "snapshot_disconnected",
        f"the connection to {spec.replay_endpoint} was lost before the snapshot was complete; unless the "
        f"engine went away, the snapshot may be over {cut} bytes (twice max_message_bytes): raise it",
    )


def replay_refused(spec: StreamSpec) -> Fault:
    return Fault("snapshot_disconnected", f"the connection to {spec.replay_endpoint} could not be made")


def gap(before: int, sequence: int) -> Fault:
    return Fault("sequence_gap", f"message {sequence} followed {before}: {sequence - before - 1} missing")


def regressed(sequence: int) -> Fault:
    sentence = f"message {sequence} lies in the past of this stream: the engine counts anew"
    return Fault("sequence_regressed", sentence)
