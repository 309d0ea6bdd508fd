"""What the endpoints of the streams app answer, and that the schema says so."""

from __future__ import annotations

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import orjson
import pytest

from kvportal.fastpath import PROGRESS_PREFIX, ROUTES
from kvportal.schema import openapi
from streams.resync import ResyncSource, ResyncTarget
from streams.status import Fault, StreamState
from tests.http import shells
from tests.http.shells import JSON, spec, status

QUERY = "/v1/internal/kv-cache/query"
STREAMS = "/v1/internal/streams"
RESYNC = "/v1/internal/streams/resync"
INSTANCE = "/v1/internal/instances/10.0.0.7:8000"
MATCH_FIELDS = [
    "instance_name",
    "dp_rank",
    "synchronized",
    "sequence",
    "device_hit_tokens",
    "host_only_hit_tokens",
    "reusable_prefix_tokens",
    "device_blocks",
    "host_blocks",
    "error",
]


def test_a_query_answers_one_match_per_stream_in_the_protocols_shape(ask, portal):
    answer = ask("POST", QUERY, orjson.dumps({"token_ids": list(range(8))}), JSON)
    matches = answer.json["matches"]
    assert [list(match)[: len(MATCH_FIELDS)] for match in matches] == [MATCH_FIELDS] * 2
    assert matches[0] == {
        "instance_name": "10.0.0.7:8000",
        "dp_rank": 0,
        "synchronized": True,
        "sequence": 17,
        "device_hit_tokens": 4,
        "host_only_hit_tokens": 2,
        "reusable_prefix_tokens": 6,
        "device_blocks": 3,
        "host_blocks": 2,
        "error": None,
        "block_size": 128,
        "incarnation_id": "Zq3",
    }
    assert matches[1] == {
        "instance_name": "10.0.0.7:8000",
        "dp_rank": 1,
        "synchronized": False,
        "sequence": None,
        "device_hit_tokens": 0,
        "host_only_hit_tokens": 0,
        "reusable_prefix_tokens": 0,
        "device_blocks": 0,
        "host_blocks": 0,
        "error": "sequence_gap: message 5 is missing",
        "block_size": 128,
        "incarnation_id": None,
    }


def test_the_index_is_asked_with_packed_token_ids(ask, portal):
    ids = [0, 1, 255, 65536, 2**31 - 1]
    ask("POST", QUERY, orjson.dumps({"token_ids": ids, "model": "ignored", "stop": [["a"]]}), JSON)
    assert portal.index.prompts == [np.array(ids, "<u4").tobytes()]


def test_an_empty_prompt_shows_state_and_block_counts(ask, portal):
    matches = ask("POST", QUERY, b'{"token_ids":[]}', JSON).json["matches"]
    assert [match["device_blocks"] for match in matches] == [3, 0]
    assert portal.index.prompts == [b""]


def test_the_list_of_streams_has_what_an_operator_wants_to_know(ask, portal):
    portal.index.statuses_now = (
        status(spec(topic="kv", incarnation="Zq3"), warning=Fault("calibration_failed", "no answer in 2 s")),
    )
    (stream,) = ask("GET", STREAMS).json["streams"]
    assert stream == {
        "instance_name": "10.0.0.7:8000",
        "dp_rank": 0,
        "state": "synchronized",
        "synchronized": True,
        "since": 1_760_000_000.25,
        "error": None,
        "warning": "calibration_failed: no answer in 2 s",
        "sequence": 17,
        "device_blocks": 3,
        "host_blocks": 2,
        "mapped_blocks": 6,
        "last_event_at": 1_760_000_001.5,
        "lag_seconds": 0.002,
        "last_snapshot": {
            "at": 1_760_000_000.0,
            "watermark": 12,
            "size_bytes": 4096,
            "seconds": 0.05,
            "count": 2,
        },
        "counters": {"messages": 9, "events:BlockStored": 7, "resyncs:start": 1, "gaps": 0},
        "endpoint": "tcp://10.0.0.7:20000",
        "replay_endpoint": "tcp://10.0.0.7:20001",
        "topic": "kv",
        "block_size": 128,
        "incarnation_id": "Zq3",
    }


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 3),
        ({"instance_name": None, "dp_rank": None}, 3),
        ({"instance_name": "10.0.0.7:8000"}, 2),
        ({"dp_rank": 0}, 2),
        ({"instance_name": "b:1", "dp_rank": 0, "drop": True}, 1),
    ],
)
def test_a_resync_is_ordered_for_the_streams_that_match(ask, portal, fields, count):
    portal.index.statuses_now += (status(spec("b:1"), StreamState.CONNECTING),)
    answer = ask("POST", RESYNC, orjson.dumps(fields), JSON)
    assert (answer.status, answer.json) == (202, {"streams": count})
    (order,) = portal.index.orders
    assert order.targets == (ResyncTarget(fields.get("instance_name"), fields.get("dp_rank")),)
    assert order.drop is fields.get("drop", False)
    assert (order.actor, order.source, order.at) == ("api", ResyncSource.API, 1_760_000_000.0)


@pytest.mark.parametrize(
    ("body", "status_code", "message"),
    [
        (b'{"instance_name":"b:1"}', 404, "no stream matches b:1; see GET /v1/internal/streams"),
        (
            b'{"instance_name":"10.0.0.7:8000","dp_rank":2}',
            404,
            "no stream matches 10.0.0.7:8000/dp2; see GET /v1/internal/streams",
        ),
        (
            b'{"instance":"b:1"}',
            400,
            "instance is not a field here; known are instance_name, dp_rank, drop",
        ),
        (b'{"instance_name":5}', 400, "instance_name must be a string of 1 to 256 characters, found 5"),
        (
            b'{"dp_rank":true}',
            400,
            f"dp_rank must be an integer from 0 to {2**63 - 1}, found the boolean true",
        ),
        (b'{"dp_rank":-1}', 400, f"dp_rank must be an integer from 0 to {2**63 - 1}, found -1"),
        (b'{"drop":"yes"}', 400, "drop must be true or false, found a string of 3 characters"),
        (b" ", 400, "the body is empty; it must be a JSON object"),
        (b"[]", 400, "the body must be a JSON object, found a list"),
        (b'{"dp_rank":9}', 404, "no instance has a stream of rank 9; see GET /v1/internal/streams"),
    ],
)
def test_a_resync_that_is_refused_orders_nothing(ask, portal, body, status_code, message):
    answer = ask("POST", RESYNC, body, JSON)
    assert (answer.status, answer.message) == (status_code, message)
    assert portal.index.orders == []


@pytest.mark.parametrize("headers", [JSON, {}])
def test_a_resync_without_a_body_means_all_streams(ask, portal, headers):
    answer = ask("POST", RESYNC, b"", headers)
    assert (answer.status, answer.json) == (202, {"streams": 2})


def test_a_resync_of_all_streams_where_there_are_none_says_so(ask, portal):
    portal.index.statuses_now = ()
    answer = ask("POST", RESYNC, b"{}", JSON)
    assert (answer.status, answer.code, answer.message) == (
        404,
        "not_found",
        "no stream is followed, so there is nothing to resynchronise; see GET /v1/internal/instances",
    )


# ---- the schema


def answer_schema(path: str, method: str, code: str) -> dict:
    document = orjson.loads(openapi())
    found = document["paths"][path][method]["responses"][code]["content"]["application/json"]["schema"]
    return {**found, "components": document["components"]}


@pytest.mark.parametrize(
    ("path", "method", "body", "code"),
    [
        (QUERY, "POST", b'{"token_ids":[1,2,3,4]}', "200"),
        (QUERY, "POST", b"{}", "400"),
        (STREAMS, "GET", b"", "200"),
        (RESYNC, "POST", b"{}", "202"),
        (RESYNC, "POST", b'{"dp_rank":9}', "404"),
    ],
)
def test_the_schema_tells_the_truth_about_real_answers(portal, path, method, body, code):
    answer = shells.ask_django(method, path, body, JSON)
    assert str(answer.status) == code
    schema = answer_schema(path, method.lower(), code)
    jsonschema.validate(answer.json, schema)
    (name,) = answer.json if answer.status < 400 else ["error"]
    with pytest.raises(jsonschema.ValidationError):  # it says something, too
        jsonschema.validate({name: None}, schema)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Instance", "load"),
        ("Instance", "latency"),
        ("Instance", "excluded"),
        ("SelectAnswer", "decode"),
        ("Stream", "last_snapshot"),
    ],
)
def test_the_schema_lets_an_object_be_null_where_it_may_be(name, field):
    components = orjson.loads(openapi())["components"]
    schema = {**components["schemas"][name]["properties"][field], "components": components}
    jsonschema.validate(None, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate("text", schema)


def test_the_schema_knows_every_field_of_a_match_and_of_a_stream(portal):
    schemas = orjson.loads(openapi())["components"]["schemas"]
    match = shells.ask_django("POST", QUERY, b'{"token_ids":[]}', JSON).json["matches"][0]
    stream = shells.ask_django("GET", STREAMS).json["streams"][0]
    assert list(schemas["Match"]["properties"]) == list(match)
    assert list(schemas["Stream"]["properties"]) == list(stream)


def test_the_schema_has_every_path_and_asks_for_the_token():
    document = orjson.loads(openapi())
    assert document["openapi"].startswith("3.")
    assert {path for _, path in ROUTES} <= set(document["paths"])
    assert f"{PROGRESS_PREFIX}{{request_id}}/progress" in document["paths"]
    assert set(document["paths"]["/v1/internal/instances/{name}"]) == {"put", "delete"}
    assert document["components"]["securitySchemes"]["internal_token"]["name"] == "X-Internal-Token"
    assert document["security"] == [{"internal_token": []}]
    for path in document["paths"].values():
        for operation in path.values():
            assert "security" not in operation  # it would take the place of the document's


READ_AGAINST_THE_CLOCK = {"query", "select", "report_progress", "heartbeat"}


def test_the_schema_lists_what_the_guard_answers_for_every_operation():
    for path in orjson.loads(openapi())["paths"].values():
        for operation in path.values():
            assert {"400", "401", "405", "413", "415", "503"} <= set(operation["responses"])
            slow = operation["operationId"] in READ_AGAINST_THE_CLOCK
            assert ("408" in operation["responses"]) is slow


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_the_guard_answers_every_method_as_the_schema_says(portal, method):
    paths = {"GET": STREAMS, "POST": RESYNC, "PUT": INSTANCE, "DELETE": INSTANCE}
    path = paths[method]
    long = b" " * (shells.MAX_BODY + 1)
    found = [
        shells.ask_django(method, path, b"{}", JSON, token=None).status,
        shells.ask_django("PATCH", path, b"{}", JSON).status,
        shells.ask_django(method, path, long, JSON).status,
        shells.ask_django(method, path, b"{}", JSON | {"content-encoding": "gzip"}).status,
    ]
    assert found == [401, 405, 413, 415]
    shells.http.install({})
    assert shells.ask_django(method, path, b"{}", JSON).status == 503


def test_the_schema_is_itself_valid():
    from drf_spectacular.validation import validate_schema

    validate_schema(orjson.loads(openapi()))
