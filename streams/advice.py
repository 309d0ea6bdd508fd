"""What a person can do about a fault of a stream, by its code. Pure."""

from __future__ import annotations

from streams.spec import StreamSpec
from streams.status import Fault

_RECOVERS = (
    "Nothing to do: a fresh snapshot is on its way. If this happens often, look at the network and at the "
    "engine's load."
)
_UNREACHABLE = "Check that the engine runs and that this machine reaches {endpoint}. The portal keeps trying."
_SNAPSHOT_SILENT = (
    "Check that the engine is not stuck and answers on {replay_endpoint}. If its snapshots are just large, "
    "raise replay_timeout_ms. The portal keeps trying."
)
_FORMAT = (
    "Engine and portal disagree about the format: compare the engine's version, its block size with the "
    "{block_size} configured here, and the log. Force resync tries again at once."
)

_ADVICE = {
    "disconnected": _UNREACHABLE,
    "connect_failed": _UNREACHABLE,
    "resolve_failed": "Check the name in {endpoint} and the name server. The portal keeps trying.",
    "unknown_block": _RECOVERS,
    "snapshot_timeout": _SNAPSHOT_SILENT,
    "snapshot_disconnected": _SNAPSHOT_SILENT,
    "snapshot_malformed": _FORMAT,
    "decode_error": _FORMAT,
    "snapshot_too_large": "Raise max_message_bytes in the KV events file, or shrink the engine's cache.",
    "message_too_large": "Raise max_message_bytes in the KV events file.",
    "buffer_overflow": "Raise max_buffered_bytes in the KV events file: snapshots take too long.",
    "index_overflow": "Raise max_blocks_per_stream in the KV events file, if the machine has the memory.",
    "total_blocks_exceeded": "Raise max_total_blocks in the KV events file, if the machine has the memory.",
    "sequence_gap": _RECOVERS,
    "sequence_regressed": (
        "Nothing to do if the engine was restarted: a fresh snapshot is on its way. If this goes on, it "
        "sends faster than it is read, or numbers its messages wrongly: look at its log."
    ),
    "snapshot_stale": (
        "Nothing to do if the engine was restarted. If this goes on, its snapshots are older than its live "
        "messages, which is a fault of the engine: look at its log."
    ),
    "unknown_event": "The engine is newer than this portal: what it says of these events is left out.",
    "unknown_medium": "The engine is newer than this portal: blocks in that medium count nowhere.",
    "resync_forced": "Nothing to do: somebody ordered a resync and its snapshot is on its way.",
    "throttled": "It takes more than its share of this process. Spread the engines over more portals.",
    "internal_error": "Look into the portal's log and report what it says. Force resync tries again.",
}

STARTING_CODES = frozenset({"connecting", "syncing"})
"""Codes that only say that a stream has not come up yet."""


def advice(fault: Fault | None, spec: StreamSpec) -> str | None:
    """A sentence or two; None where there is nothing to say."""
    text = _ADVICE.get(fault.code) if fault else None
    if text is None:
        return None
    return text.format(
        endpoint=spec.endpoint, replay_endpoint=spec.replay_endpoint, block_size=spec.block_size
    )
