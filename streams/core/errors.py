"""What makes a stream's view invalid, as exceptions with a stable code and a sentence."""

from __future__ import annotations


class StreamError(Exception):
    """Something that one stream cannot serve with. `code` is stable; the text is for people."""

    code = "stream_error"


class DecodeError(StreamError):
    """Bytes that do not fit the protocol."""

    code = "decode_error"


class IndexOverflowError(StreamError):
    """More blocks are held than the stream may map."""

    code = "index_overflow"


class UnknownBlockError(StreamError):
    """A live batch names a parent, or a block without tokens, that was never announced."""

    code = "unknown_block"

    def __init__(self, block_hash: int, role: str) -> None:
        super().__init__(f"{role} {block_hash} was never announced on this stream")
        self.block_hash = block_hash
