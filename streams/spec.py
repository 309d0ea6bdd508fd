"""What the streams app is told: which streams to follow and within which limits.

These values come from configuration or from discovery; they are frozen, so a changed stream is a
new value and the directory can compare old and new by equality.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_HASH_SEED = 1024


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """Names one stream: the events of one data-parallel rank of one instance."""

    instance_name: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.instance_name}/dp{self.dp_rank}"

    @classmethod
    def read(cls, text: str) -> StreamId | None:
        """The stream that `str` gives this text for; None when it is no such text."""
        instance_name, _, rank = text.rpartition("/dp")
        return cls(instance_name, int(rank)) if rank.isdecimal() else None


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream to follow.

    Two specs that compare equal are the same stream: the directory leaves its subscriber and its
    index alone. Any difference (endpoint, incarnation, block size, ...) retires the old stream.
    """

    instance_name: str
    dp_rank: int
    endpoint: str
    """`tcp://host:port` of the engine's XPUB socket (live increments)."""
    replay_endpoint: str
    """`tcp://host:port` of the engine's ROUTER socket (full snapshots)."""
    block_size: int = 128
    """Tokens per block; an event with another size is a decode error."""
    topic: str = ""
    """Compared for equality with the first frame; an empty topic is matched by an empty frame."""
    hash_seed: int = DEFAULT_HASH_SEED
    """Seed of the content keys; ours alone, the engine's own hash does not depend on it."""
    incarnation: str | None = None
    """Identity of the engine process that the stream belongs to; None for a static stream, whose
    hits therefore never count in routing."""

    @property
    def id(self) -> StreamId:
        return StreamId(self.instance_name, self.dp_rank)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one directory may hold and how it recovers. Sizes in bytes, times in ms."""

    max_streams: int = 128
    max_total_blocks: int = 0
    """Blocks mapped over all streams; 0 means no bound."""
    max_blocks_per_stream: int = 262_144
    """Bounds one stream's block-hash map, entries kept for absent blocks included."""
    max_message_bytes: int = 8 * 1024 * 1024
    """Largest live message, and largest whole snapshot reply."""
    max_buffered_bytes: int = 16 * 1024 * 1024
    """Budget for live messages held back while a snapshot is on its way."""
    replay_timeout_ms: int = 2_000
    """Time for one whole snapshot, from the request to the end marker."""
    resync_interval_ms: int = 30_000
    """Time between two periodic calibrations."""
