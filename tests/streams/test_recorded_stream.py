"""What vLLM's own event publisher sent, played through real sockets. Its replay channel has another
protocol than ours (history instead of a snapshot), so an empty snapshot is served beside it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.spec import StreamSpec
from tests.streams.harness import Portal
from tests.streams.puppet import Puppet

RECORDING = Path(__file__).parents[1] / "data" / "vllm-0.33.0.jsonl"


class Recording:
    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.prompts: dict[str, Any] = next(line for line in lines if line["kind"] == "prompts")
        self.live = [
            [b64decode(frame) for frame in line["frames"]] for line in lines if line["kind"] == "live"
        ]
        self.history = [
            [b64decode(frame) for frame in line["frames"]]
            for line in lines
            if line["kind"] == "replay_from_3"
        ]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording(RECORDING)


@pytest.fixture
def followed(
    recording: Recording, portal: Portal, make_puppet: Callable[..., Puppet]
) -> tuple[Puppet, StreamSpec]:
    """A puppet with the recording's topic, and the stream that follows it from an empty snapshot."""
    puppet = make_puppet(topic=recording.prompts["topic"])
    spec = StreamSpec(
        "vllm",
        0,
        puppet.spec.endpoint,
        puppet.spec.replay_endpoint,
        recording.prompts["block_size"],
        recording.prompts["topic"],
    )
    portal.follow(spec)
    puppet.wait_subscribed()
    puppet.request().answer(0)
    portal.wait_synchronized(spec)
    return puppet, spec


def test_the_first_eight_messages_give_exactly_the_expected_answer(
    recording: Recording, portal: Portal, followed: tuple[Puppet, StreamSpec]
) -> None:
    puppet, spec = followed
    for frames in recording.live[:8]:
        puppet.frames(*frames)
    portal.wait_sequence(spec, 7)
    prompts = recording.prompts
    expected = prompts["expect_after_live_8"]["base"]
    base = portal.match(spec, prompts["base"])
    assert base.device_hit_tokens == expected["device_hit_tokens"] == 32
    assert base.host_only_hit_tokens == expected["host_only_hit_tokens"] == 16
    assert base.device_blocks == expected["device_blocks_total_plain_text"] == 7
    assert base.host_blocks == 3
    # The rest of the prompt, and what was typed after it, hang behind a block that is gone.
    assert portal.hits(spec, prompts["base"] + prompts["branch"]) == (32, 16)
    assert portal.hits(spec, prompts["base"][:32]) == (32, 0)
    assert portal.hits(spec, prompts["base"][:47]) == (32, 0)
    for alone in ("branch", "lora", "multimodal"):
        assert portal.hits(spec, prompts[alone]) == (0, 0)
    assert portal.losses(spec) == []
    assert portal.resyncs(spec) == {"start": 1}
    assert "STORAGE" in portal.wait_warning(spec, "unknown_medium")


def test_before_anything_is_removed_the_whole_prompt_is_on_the_device(
    recording: Recording, portal: Portal, followed: tuple[Puppet, StreamSpec]
) -> None:
    puppet, spec = followed
    for frames in recording.live[:4]:
        puppet.frames(*frames)
    portal.wait_sequence(spec, 3)
    whole = recording.prompts["base"] + recording.prompts["branch"]
    assert portal.hits(spec, whole) == (len(whole), 0)
    assert portal.status(spec).device_blocks == 10
    assert portal.status(spec).mapped_blocks == 14
    puppet.frames(*recording.live[4])
    portal.wait_sequence(spec, 4)
    assert portal.hits(spec, whole) == (len(whole) - 16, 0)


def test_the_ninth_message_clears_everything(
    recording: Recording, portal: Portal, followed: tuple[Puppet, StreamSpec]
) -> None:
    puppet, spec = followed
    for frames in recording.live:
        puppet.frames(*frames)
    status = portal.wait_sequence(spec, 8)
    assert (status.device_blocks, status.host_blocks, status.mapped_blocks) == (0, 0, 0)
    assert portal.hits(spec, recording.prompts["base"]) == (0, 0)
    assert portal.match(spec, []).synchronized
    assert portal.losses(spec) == []


def test_vllms_replay_of_history_is_not_taken_for_a_snapshot(
    recording: Recording, portal: Portal, make_puppet: Callable[..., Puppet]
) -> None:
    """It would claim that the blocks of old messages are all there is."""
    puppet = make_puppet(topic=recording.prompts["topic"])
    portal.follow(puppet.spec)
    request = puppet.request()
    for frames in recording.history:
        request.send(*frames)
    assert "frames" in portal.wait_error(puppet.spec, "snapshot_malformed")
    assert portal.hits(puppet.spec, recording.prompts["multimodal"]) == (0, 0)
