"""The KV events file: what is taken, what is refused, and where the fault is placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvportal.config.events_file import parse_events, read_events_file
from kvportal.config.faults import Faults
from streams.discovery import DiscoverySettings
from streams.spec import Limits, StreamSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy/examples/kv_events_discovery_config.json"


def stream(**changes: Any) -> dict[str, Any]:
    return {
        "instance_name": "10.0.0.7:8000",
        "endpoint": "tcp://10.0.0.7:18000",
        "replay_endpoint": "tcp://10.0.0.7:38000",
        **changes,
    }


def other(**changes: Any) -> dict[str, Any]:
    return stream(
        **{
            "instance_name": "b",
            "endpoint": "tcp://10.0.0.8:18000",
            "replay_endpoint": "tcp://10.0.0.8:38000",
            **changes,
        }
    )


def parse(document: Any) -> tuple[Any, list[str]]:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    faults = Faults()
    return parse_events(data, "file", faults), [str(fault) for fault in faults]


def test_the_example_that_is_shipped_turns_discovery_on():
    faults = Faults()
    config = read_events_file(str(EXAMPLE), "--kv-events-config-file", faults)
    assert faults == []
    assert config.discovery == DiscoverySettings(True, 128, "xllm-kv", 10000, 30000, 1000)
    assert config.limits == Limits()
    assert config.streams == ()


def test_an_empty_object_follows_nothing_with_the_documented_limits():
    config, faults = parse({})
    assert faults == []
    assert (config.streams, config.discovery) == ((), None)
    assert config.limits == Limits(128, 0, 262144, 8388608, 16777216, 2000, 30000)


def test_keys_inside_discovery_default_to_the_example_but_off():
    config, faults = parse({"discovery": {}})
    assert faults == []
    assert config.discovery == DiscoverySettings(False, 128, "xllm-kv", 10000, 30000, 1000)


def test_every_limit_is_taken_as_given():
    given = {
        "max_streams": 1,
        "max_total_blocks": 7,
        "max_blocks_per_stream": 1,
        "max_message_bytes": 1,
        "max_buffered_bytes": 1,
        "replay_timeout_ms": 1,
        "resync_interval_ms": 1,
    }
    config, faults = parse(given)
    assert faults == []
    assert config.limits == Limits(**given)


def test_static_streams_have_the_documented_defaults():
    config, faults = parse({"streams": [stream()]})
    assert faults == []
    assert config.streams == (
        StreamSpec("10.0.0.7:8000", 0, "tcp://10.0.0.7:18000", "tcp://10.0.0.7:38000", 128, "", 1024),
    )


def test_static_streams_take_every_key():
    full = stream(dp_rank=3, block_size=16, topic="kv", hash_seed=2**64 - 1)
    config, faults = parse({"streams": [full], "discovery": {"enabled": False}})
    assert faults == []
    assert config.streams[0].id.dp_rank == 3
    assert (config.streams[0].block_size, config.streams[0].topic, config.streams[0].hash_seed) == (
        16,
        "kv",
        2**64 - 1,
    )
    assert config.streams[0].incarnation is None


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://host-1.example:1",
        "tcp://127.0.0.1:65535",
        "tcp://[::1]:5557",
        "tcp://[fe80::1%eth0]:5557",
        "tcp://a_b:9",
    ],
)
def test_connectable_endpoints_are_taken(endpoint):
    config, faults = parse({"streams": [stream(endpoint=endpoint)]})
    assert faults == []
    assert config.streams[0].endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://[::]:5557",
        "tcp://[0:0:0:0:0:0:0:0]:5557",
        "tcp://[::ffff:0.0.0.0]:5557",
        "tcp://0:5557",
        "tcp://0x0:5557",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:*",
        "tcp://host:",
        "tcp://host",
        "tcp://:5557",
        "tcp://::1:5557",
        "tcp://[::1]",
        "tcp://[host]:5557",
        "tcp://eth0;host:5557",
        "tcp://host:5557 ",
        "tcp://ho st:5557",
        "tcp://-host:5557",
        "tcp://256.0.0.1:5557",
        "ipc:///tmp/socket",
        "TCP://host:5557",
        "host:5557",
        "",
    ],
)
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_endpoints_that_nothing_can_connect_to_are_refused(key, endpoint):
    _, faults = parse({"streams": [stream(**{key: endpoint})]})
    assert len(faults) == 1
    assert faults[0].startswith(f"file: streams[0].{key}: found {endpoint!r} (")
    assert "tcp://host:port" in faults[0]


VALUES = [
    ("max_streams", 0, "0", "from 1 to 128"),
    ("max_streams", 129, "129", "from 1 to 128"),
    ("max_streams", True, "true", "from 1 to 128"),
    ("max_streams", 5.0, "5.0", "an integer"),
    ("max_streams", "5", "'5'", "an integer"),
    ("max_streams", None, "null", "an integer"),
    ("max_streams", [5], "a list", "an integer"),
    ("max_total_blocks", -1, "-1", "at least 0"),
    ("max_blocks_per_stream", 0, "0", "at least 1"),
    ("max_message_bytes", 0, "0", "at least 1"),
    ("max_buffered_bytes", 0, "0", "at least 1"),
    ("replay_timeout_ms", 0, "0", "from 1 to"),
    ("resync_interval_ms", -5, "-5", "from 1 to"),
    ("resync_interval_ms", 10**30, str(10**30), "from 1 to"),
    ("max_buffered_bytes", float("nan"), "NaN", "at least 1"),
    ("streams", {}, "an object", "a list of objects"),
    ("streams", None, "null", "a list of objects"),
    ("discovery", [], "a list", "an object"),
    ("discovery", None, "null", "an object"),
    ("discovery.enabled", 1, "1", "true or false"),
    ("discovery.enabled", "true", "'true'", "true or false"),
    ("discovery.block_size", 0, "0", "from 1 to"),
    ("discovery.block_size", True, "true", "an integer"),
    ("discovery.topic", 5, "5", "text"),
    ("discovery.topic", "\ud800", "'\\ud800'", "text"),
    ("discovery.event_port_offset", -1, "-1", "from 0 to 65535"),
    ("discovery.replay_port_offset", 65536, "65536", "from 0 to 65535"),
    ("discovery.replay_port_offset", 10000, "10000, the same as event_port_offset", "another offset"),
    ("discovery.refresh_interval_ms", 49, "49", "from 50 to 60000"),
    ("discovery.refresh_interval_ms", 60001, "60001", "from 50 to 60000"),
    ("discovery.refresh_interval_ms", False, "false", "from 50 to 60000"),
    ("streams[0].instance_name", "", "''", "a name"),
    ("streams[0].instance_name", " a", "' a'", "a name"),
    ("streams[0].instance_name", "a\nb", "'a\\nb'", "a name"),
    ("streams[0].instance_name", 7, "7", "a name"),
    ("streams[0].dp_rank", -1, "-1", "an integer"),
    ("streams[0].dp_rank", True, "true", "an integer"),
    ("streams[0].block_size", 0, "0", "an integer"),
    ("streams[0].topic", None, "null", "text"),
    ("streams[0].hash_seed", -1, "-1", "an integer"),
    ("streams[0].hash_seed", 2**64, str(2**64), "an integer"),
    ("streams[0].endpoint", 5, "5", "tcp://host:port"),
    ("streams[0].replay_endpoint", None, "null", "tcp://host:port"),
]


@pytest.mark.parametrize(("key", "value", "found", "allowed"), VALUES)
def test_a_value_out_of_its_kind_or_range_is_placed_shown_and_explained(key, value, found, allowed):
    head, _, last = key.rpartition(".")
    if not head:
        document = {key: value}
    elif head == "discovery":
        document = {"discovery": {last: value}}
    else:
        document = {"streams": [stream(**{last: value})]}
    _, faults = parse(document)
    assert len(faults) == 1
    assert faults[0].startswith(f"file: {key}: found {found}; allowed: ")
    assert allowed in faults[0].split("allowed: ")[1]


@pytest.mark.parametrize("interval", [50, 60000])
def test_the_bounds_of_the_refresh_interval_are_allowed(interval):
    config, faults = parse({"discovery": {"refresh_interval_ms": interval}})
    assert faults == []
    assert config.discovery.refresh_interval_ms == interval


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ({"max_stream": 1}, "file"),
        ({"discovery": {"max_stream": 1}}, "file: discovery"),
        ({"streams": [stream(max_stream=1)]}, "file: streams[0]"),
    ],
)
def test_an_unknown_key_is_refused_by_name(document, where):
    _, faults = parse(document)
    assert len(faults) == 1
    assert faults[0].startswith(f"{where}: found the unknown key 'max_stream'; allowed: ")


@pytest.mark.parametrize("key", ["instance_name", "endpoint", "replay_endpoint"])
def test_a_stream_without_a_required_key_is_refused(key):
    element = stream()
    del element[key]
    _, faults = parse({"streams": [element]})
    assert len(faults) == 1
    assert faults[0].startswith(f"file: streams[0].{key}: found nothing; allowed: ")


@pytest.mark.parametrize(
    ("second", "place", "owner"),
    [
        ({"instance_name": "10.0.0.7:8000"}, "streams[1]", "streams[0]"),
        ({"endpoint": "tcp://10.0.0.7:18000"}, "streams[1].endpoint", "streams[0].endpoint"),
        ({"endpoint": "tcp://10.0.0.7:38000"}, "streams[1].endpoint", "streams[0].replay_endpoint"),
        ({"replay_endpoint": "tcp://10.0.0.7:18000"}, "streams[1].replay_endpoint", "streams[0].endpoint"),
        (
            {"replay_endpoint": "tcp://10.0.0.7:38000"},
            "streams[1].replay_endpoint",
            "streams[0].replay_endpoint",
        ),
        ({"replay_endpoint": "tcp://10.0.0.8:18000"}, "streams[1].replay_endpoint", "streams[1].endpoint"),
        ({"endpoint": "tcp://10.0.0.7:018000"}, "streams[1].endpoint", None),
    ],
)
def test_duplicates_across_all_streams_are_refused(second, place, owner):
    _, faults = parse({"streams": [stream(), other(**second)]})
    assert len(faults) == 1
    assert faults[0].startswith(f"file: {place}: found ")
    if owner:
        assert f"which {owner} already has" in faults[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tcp://[::1]:5557", "tcp://[0:0:0:0:0:0:0:1]:5557"),
        ("tcp://Host.example:5557", "tcp://host.example.:05557"),
    ],
)
def test_two_spellings_of_one_address_are_a_duplicate(first, second):
    _, faults = parse({"streams": [stream(endpoint=first), other(endpoint=second)]})
    assert len(faults) == 1
    assert "which streams[0].endpoint already has" in faults[0]


def test_two_ranks_of_one_instance_are_no_duplicate():
    ranks = [stream(), other(instance_name="10.0.0.7:8000", dp_rank=1)]
    config, faults = parse({"streams": ranks})
    assert faults == []
    assert [spec.id.dp_rank for spec in config.streams] == [0, 1]


def test_discovery_and_static_streams_exclude_each_other():
    _, faults = parse({"discovery": {"enabled": True}, "streams": [stream()]})
    assert len(faults) == 1
    assert faults[0].startswith("file: streams: found static streams together with discovery.enabled")
    assert parse({"discovery": {"enabled": True}, "streams": []})[1] == []


def numbered(count: int) -> list[dict[str, Any]]:
    return [
        stream(instance_name=f"i{n}", endpoint=f"tcp://h:{1000 + n}", replay_endpoint=f"tcp://h:{3000 + n}")
        for n in range(count)
    ]


@pytest.mark.parametrize(("limits", "most"), [({}, 128), ({"max_streams": 2}, 2)])
def test_more_static_streams_than_max_streams_are_refused(limits, most):
    assert parse({**limits, "streams": numbered(most)})[1] == []
    _, faults = parse({**limits, "streams": numbered(most + 1)})
    assert faults == [f"file: streams: found {most + 1} streams; allowed: at most max_streams, {most}"]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "found an empty file; allowed: one JSON object"),
        (b" \n", "an empty file"),
        (b"{", "found no valid JSON (Expecting property name enclosed in double quotes at line 1, column 2)"),
        (b"{} {}", "Extra data at line 1, column 4"),
        (b"{'a': 1}", "line 1, column 2"),
        (b"\xef\xbb\xbf{}", "a byte order mark"),
        ("{}".encode("utf-16"), "a byte order mark"),
        (b'{"topic": "\xff"}', "an invalid byte at offset 11"),
        (b"[]", "a list at the top"),
        (b"null", "null at the top"),
        (b"5", "a number at the top"),
        (b"[" * 100_000, "a nesting beyond every limit"),
        (b'{"max_streams": ' + b"1" * 10_000 + b"}", "a number or a nesting beyond every limit"),
        (b'{"max_streams": 1, "max_streams": 2}', "the key 'max_streams' more than once"),
        (b'{"discovery": {"topic": "a", "topic": "a"}}', "the key 'topic' more than once"),
    ],
)
def test_a_file_that_is_not_one_plain_json_object_is_refused(data, found):
    _, faults = parse(data)
    assert len(faults) == 1
    assert faults[0].startswith("file: found ")
    assert found in faults[0]


def test_all_faults_are_collected():
    _, faults = parse(
        {
            "surprise": 1,
            "max_streams": 0,
            "discovery": {"enabled": True, "refresh_interval_ms": 1, "topci": ""},
            "streams": [stream(endpoint="tcp://*:1"), other(dp_rank=-1), 5],
        }
    )
    assert [fault.split(": found")[0] for fault in faults] == [
        "file",
        "file: max_streams",
        "file: discovery",
        "file: discovery.refresh_interval_ms",
        "file: streams[0].endpoint",
        "file: streams[1].dp_rank",
        "file: streams[2]",
        "file: streams",
    ]


def test_a_long_value_is_cut_in_its_fault():
    _, faults = parse({"streams": [stream(endpoint="x" * 10_000)]})
    assert len(faults[0]) < 400
    assert "(10,002 characters)" in faults[0]


@pytest.mark.parametrize("make", ["missing", "directory", "huge"])
def test_a_file_that_cannot_be_read_is_a_fault_of_the_flag_that_names_it(tmp_path, make):
    path = tmp_path / "kv.json"
    if make == "directory":
        path.mkdir()
    elif make == "huge":
        path.write_bytes(b" " * (4 * 1024 * 1024 + 1))
    faults = Faults()
    read_events_file(str(path), "--kv-events-config-file", faults)
    assert len(faults) == 1
    assert str(path) in str(faults[0])
