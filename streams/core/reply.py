"""A snapshot reply, frame set by frame set: `["", watermark, payload]` ... then the end marker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from xxhash import xxh3_128_digest

from streams.core.errors import DecodeError, StreamError
from streams.core.wire import END_SEQUENCE, body_digest, decode_sequence

FRAMES = 3


class SnapshotMalformedError(StreamError):
    """A reply that does not follow the replay protocol."""

    code = "snapshot_malformed"


class SnapshotTooLargeError(StreamError):
    """A reply over the size limit."""

    code = "snapshot_too_large"


class SnapshotReply:
    """Collects one reply. Bounded by `max_bytes` over all its payloads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.payloads: list[bytes | memoryview] = []
        self.size = 0
        self.watermark = -1

    def add(self, parts: Sequence[bytes | memoryview], count: int, size: int) -> bool:
        """Take one frame set; True when the reply is complete. Raises StreamError.

        `count` and `size` (bytes) are those of the message as received, of which `parts` may be the
        beginning only.
        """
        if self.size + size > self._max_bytes:
            raise SnapshotTooLargeError(
                f"the snapshot has at least {self.size + size} bytes, "
                f"max_message_bytes allows {self._max_bytes}: raise it"
            )
        if count != FRAMES:
            raise SnapshotMalformedError(
                f"a reply has {count} frames, it must have {FRAMES}: empty, watermark, payload"
            )
        if parts[0] != b"":
            raise SnapshotMalformedError(f"a reply's first frame has {len(parts[0])} bytes, it must be empty")
        try:
            watermark = decode_sequence(parts[1])
        except DecodeError as error:
            raise SnapshotMalformedError(f"in a reply, {error}") from None
        if watermark == END_SEQUENCE:
            return self._finish(parts[2])
        if self.payloads and watermark != self.watermark:
            raise SnapshotMalformedError(f"one reply has two watermarks, {self.watermark} and {watermark}")
        self.watermark = watermark
        self.size += size
        self.payloads.append(parts[2])
        return False

    @cached_property
    def digest(self) -> tuple[int, bytes]:
        """Equal for complete replies that say the same: the watermark, and the bodies without timestamps."""
        return self.watermark, xxh3_128_digest(b"".join(map(body_digest, self.payloads)))

    def _finish(self, payload: bytes | memoryview) -> bool:
        if payload:
            raise SnapshotMalformedError(f"the end marker carries {len(payload)} bytes, it must be empty")
        if not self.payloads:
            raise SnapshotMalformedError("the reply ends without a snapshot")
        return True
