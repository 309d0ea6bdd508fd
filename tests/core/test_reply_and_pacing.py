"""Snapshot replies frame by frame, and the arithmetic of pacing."""

from __future__ import annotations

import pytest

from streams.core.errors import StreamError
from streams.core.reply import SnapshotReply
from streams.core.wire import END_SEQUENCE
from streams.pacing import LONGEST, PAUSE, SHARE, WORK, Pacer
from streams.simulator.messages import sequence_frame

END = [b"", sequence_frame(END_SEQUENCE), b""]


def add(reply: SnapshotReply, *parts: bytes) -> bool:
    return reply.add(list(parts), len(parts), sum(map(len, parts)))


def part(watermark: int, payload: bytes) -> list[bytes]:
    return [b"", sequence_frame(watermark), payload]


def test_a_reply_of_several_parts_is_complete_with_the_end_marker() -> None:
    reply = SnapshotReply(100)
    assert not add(reply, *part(7, b"one"))
    assert not add(reply, *part(7, b"two"))
    assert add(reply, *END)
    assert (reply.watermark, reply.payloads) == (7, [b"one", b"two"])


@pytest.mark.parametrize(
    ("frames", "code", "words"),
    [
        ([END], "snapshot_malformed", "without a snapshot"),
        ([[b"", bytes(8)]], "snapshot_malformed", "3"),
        ([[b"", b"kv-events", bytes(8), b"x"]], "snapshot_malformed", "4 frames"),
        ([[b"x", bytes(8), b""]], "snapshot_malformed", "first frame has 1 bytes, it must be empty"),
        ([[b"", bytes(7), b""]], "snapshot_malformed", "7 bytes"),
        ([part(1, b"a"), part(2, b"b")], "snapshot_malformed", "two watermarks, 1 and 2"),
        ([part(1, b"a"), [b"", sequence_frame(END_SEQUENCE), b"x"]], "snapshot_malformed", "end marker"),
        ([part(1, bytes(93))], "snapshot_too_large", "max_message_bytes allows 100: raise it"),
        ([part(1, bytes(50)), part(1, bytes(50))], "snapshot_too_large", "116 bytes"),
    ],
)
def test_a_reply_that_breaks_the_protocol_says_how(frames: list[list[bytes]], code: str, words: str) -> None:
    reply = SnapshotReply(100)
    for parts in frames[:-1]:
        assert not add(reply, *parts)
    with pytest.raises(StreamError, match=words) as caught:
        add(reply, *frames[-1])
    assert caught.value.code == code


def test_a_reply_exactly_at_the_limit_is_taken() -> None:
    assert not add(SnapshotReply(100), *part(1, bytes(92)))


def test_work_is_interrupted_by_pauses() -> None:
    pacer = Pacer(0.0)
    assert pacer.pause(WORK / 2) == 0.0
    assert pacer.pause(WORK / 2) == PAUSE
    assert pacer.pause(WORK / 2) == 0.0


def test_a_stream_within_its_share_is_never_throttled() -> None:
    pacer = Pacer(0.0)
    assert all(pacer.throttle(0.01 * SHARE, 0.01 * turn) == 0.0 for turn in range(1, 2000))


def test_a_stream_that_wants_a_whole_core_gets_its_share() -> None:
    pacer, now, worked = Pacer(0.0), 0.0, 0.0
    while now < 20.0:
        now += 0.002
        worked += 0.002
        now += pacer.throttle(0.002, now)
    assert worked / now == pytest.approx(SHARE, abs=0.03)


def test_one_long_piece_of_work_is_paid_for_in_short_sleeps() -> None:
    assert Pacer(0.0).throttle(10.0, 10.0) == LONGEST
