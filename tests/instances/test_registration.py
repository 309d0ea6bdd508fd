"""Values written by engines: what is understood, what is refused, and in which words."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from routing.instances.model import Latency, LoadReport, Registration, Role
from routing.instances.registration import (
    _REQUIRED,
    MAX_VALUE_BYTES,
    InvalidInputError,
    NotJsonError,
    _Deletion,
    _Heartbeat,
    _Latency,
    _LeasedRegistration,
    _Load,
    _Registration,
    check_name,
    load_document,
    parse_deletion,
    parse_heartbeat,
    parse_leased_registration,
    parse_load,
    parse_registration,
)

NAME = "10.0.0.7:8000"
REAL = {
    "name": NAME,
    "rpc_address": "10.0.0.7:9000",
    "incarnation_id": "Zq3",
    "register_ts_ms": 1760000000000,
    "type": 1,
    "addrs": ["10.0.0.7"],
    "cluster_ids": [1],
    "k_cache_ids": [],
    "v_cache_ids": [],
    "dp_size": 2,
    "device_ips": ["10.0.0.7"],
    "ports": [26000],
    "ttft_profiling_data": [[512, 31.0], [1024, 55.5]],
    "tpot_profiling_data": [[512, 8, 21.0]],
}


def parsed(**fields: object) -> Registration:
    return parse_registration(NAME, json.dumps(fields).encode(), Role.DECODE)


def test_a_real_registration_is_read_whole() -> None:
    assert parse_registration(NAME, json.dumps(REAL).encode()) == Registration(
        name=NAME,
        role=Role.PREFILL,
        incarnation_id="Zq3",
        register_ts_ms=1760000000000,
        dp_size=2,
        rpc_address="10.0.0.7:9000",
        ttft_profiling_data=((512, 31.0), (1024, 55.5)),
        tpot_profiling_data=((512, 8, 21.0),),
    )


@pytest.mark.parametrize(
    ("wire", "role"), [(0, Role.DEFAULT), (1, Role.PREFILL), (2, Role.DECODE), (3, Role.MIX)]
)
def test_the_type_is_a_number(wire: int, role: Role) -> None:
    assert parsed(type=wire).role is role


def test_without_a_type_the_prefix_of_the_key_counts() -> None:
    assert parsed().role is Role.DECODE


@pytest.mark.parametrize(
    "fields",
    [{}, {"incarnation_id": "", "register_ts_ms": 0}, {"incarnation_id": None, "register_ts_ms": None}],
)
def test_an_old_engine_has_no_identity(fields: dict[str, object]) -> None:
    registration = parsed(**fields)
    assert (registration.incarnation_id, registration.register_ts_ms) == (None, None)
    assert registration.identity is None


def test_the_incarnation_is_the_identity_and_the_time_stands_in_for_it() -> None:
    assert parsed(incarnation_id="a", register_ts_ms=5).identity == "a"
    assert parsed(register_ts_ms=5).identity == "register_ts_ms:5"


def test_unknown_fields_and_other_backends_are_taken() -> None:
    registration = parsed(backend="vLLM", colour={"deep": [1, {"er": None}]}, addrs=17)
    assert registration.backend == "vllm"
    assert parsed().backend == "xllm"


def test_the_name_in_the_value_does_not_count() -> None:
    assert parsed(name="somebody else").name == NAME


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"", "not JSON: it is empty"),
        (b"nonsense", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"name": "\xff"}', "not JSON"),
        (b'{"dp_size": 1} x', "not JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[]", "must be an object, not a list"),
        (b"null", "must be an object, not null"),
        (b'"x"', "must be an object"),
        (b'{"dp_size": "2"}', "dp_size: must be an integer or null, not text"),
        (b'{"dp_size": true}', "dp_size: must be an integer or null, not a boolean"),
        (b'{"dp_size": 2.5}', "dp_size: must be an integer or null, not a decimal number"),
        (b'{"dp_size": 0}', "dp_size: 0; it must be from 1 to 9223372036854775807"),
        (b'{"dp_size": -3}', "dp_size: -3"),
        (b'{"dp_size": 99999999999999999999999}', "dp_size: 99999999999999999999999; it must be from 1 to"),
        (b'{"type": 4}', "type: 4; it must be 0 (DEFAULT), 1 (PREFILL), 2 (DECODE), 3 (MIX)"),
        (b'{"type": -1}', "type: -1"),
        (b'{"type": "MIX"}', "type: must be an integer or null, not text"),
        (b'{"name": 7}', "name: must be text or null, not an integer"),
        (b'{"incarnation_id": 7}', "incarnation_id: must be text or null"),
        (b'{"incarnation_id": "' + b"x" * 300 + b'"}', "incarnation_id: longer than 256"),
        (b'{"register_ts_ms": "now"}', "register_ts_ms: must be an integer or null"),
        (b'{"register_ts_ms": -5}', "register_ts_ms: -5"),
        (
            b'{"register_ts_ms": 9223372036854775808}',
            "register_ts_ms: 9223372036854775808; it must be milliseconds since the epoch, from 0 to 92233",
        ),
        (b'{"ttft_profiling_data": [[1, 2], [3]]}', "ttft_profiling_data[1]: has 1 numbers; it must have 2"),
        (b'{"ttft_profiling_data": [[]]}', "ttft_profiling_data[0]: has 0 numbers"),
        (b'{"ttft_profiling_data": [[1, 2, 3]]}', "it must have 2: tokens, ms"),
        (b'{"tpot_profiling_data": [[1, 2]]}', "it must have 3: avg_len, batch, ms"),
        (b'{"backend": []}', "backend: must be text or null"),
        (b'{"ttft_profiling_data": [[1, "x"]]}', "ttft_profiling_data[0][1]: must be a number, not text"),
        (b'{"tpot_profiling_data": [1]}', "tpot_profiling_data[0]: must be a list"),
        (b'{"x": "' + b"y" * MAX_VALUE_BYTES + b'"}', "bytes long; at most 524,288 are allowed"),
    ],
)
def test_a_registration_that_does_not_fit_is_refused_with_the_field(value: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_registration(NAME, value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "a\n", "a\x00", "x" * 257, "a\u2028b"])
def test_a_name_that_could_not_be_shown_or_addressed_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^name: "):
        check_name(name)


@pytest.mark.parametrize(
    "name", ["10.0.0.7:8000", "[fe80::1]:80", "engine-3.pool_b:8000", "ünïcode:1", "nonsense"]
)
def test_any_other_name_is_taken(name: str) -> None:
    assert check_name(name) == name


def test_a_leased_registration_has_a_ttl_and_the_path_names_it() -> None:
    registration, ttl = parse_leased_registration(NAME, b'{"ttl_s": 5, "type": 2}')
    assert (registration.role, ttl) == (Role.DECODE, 5.0)
    with pytest.raises(InvalidInputError, match=r"name: 'b:1'; it must be left out or equal the path's"):
        parse_leased_registration(NAME, b'{"name": "b:1", "ttl_s": 5}')


def test_what_does_not_fit_is_told_field_by_field() -> None:
    value = (
        b'{"dp_size": "2", "incarnation_id": 4, "type": -1, "ttft_profiling_data": [[1, "x"], [2], [1, 2]]}'
    )
    with pytest.raises(InvalidInputError) as caught:
        parse_registration(NAME, value)
    assert str(caught.value).split(". ") == [
        "incarnation_id: must be text or null, not an integer",
        "dp_size: must be an integer or null, not text",
        "ttft_profiling_data[0][1]: must be a number, not text",
        "type: -1; it must be 0 (DEFAULT), 1 (PREFILL), 2 (DECODE), 3 (MIX)",
    ]


@pytest.mark.parametrize(
    "struct", [_Registration, _LeasedRegistration, _Heartbeat, _Load, _Latency, _Deletion]
)
def test_every_required_field_says_what_it_must_be(struct: type) -> None:
    required = {field.name for field in msgspec.structs.fields(struct) if field.required}
    assert required <= set(_REQUIRED)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b'{"dp_size": "x", "y": NaN}', "NaN is no JSON value"),
        (b'{"dp_size": "x", "y"', "Expecting"),
        (b'{"dp_size": "x", "y": "\xff"}', "can't decode"),
        (b'{"ttft_profiling_data": [[1e999, 2]], "incarnation_id": "\\ud800"}', "half of a character"),
    ],
)
def test_a_field_that_does_not_fit_hides_no_fault_of_the_json_behind_it(value: bytes, sentence: str) -> None:
    with pytest.raises(NotJsonError, match=sentence):
        parse_registration(NAME, value)


@pytest.mark.parametrize(
    ("digits", "sentence"), [(400, "dp_size: a number of more than 30 digits"), (5000, "too many digits")]
)
def test_a_huge_number_is_not_repeated(digits: int, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        parse_registration(NAME, b'{"dp_size": ' + b"9" * digits + b"}")
    assert len(str(caught.value)) < 200


def beat(load: str, **more: object) -> bytes:
    rest = "".join(f', "{key}": {json.dumps(value)}' for key, value in more.items())
    return f'{{"name": "{NAME}", "load_metrics": {load}{rest}}}'.encode()


def test_a_heartbeat_is_read_and_its_cache_event_ignored() -> None:
    load = '{"waiting_requests_num": 3, "gpu_cache_usage_perc": 0.5}'
    heartbeat = parse_heartbeat(
        beat(
            load,
            incarnation_id="a",
            latency_metrics={"recent_max_ttft": 7, "recent_max_tbt": 1.5},
            cache_event={"stored": ["x"]},
        )
    )
    assert heartbeat.load == LoadReport(3, 0.5)
    assert heartbeat.latency == Latency(7.0, 1.5)
    assert (heartbeat.name, heartbeat.incarnation_id) == (NAME, "a")
    assert parse_heartbeat(beat(load, incarnation_id="")).incarnation_id is None


@pytest.mark.parametrize(
    ("load", "valid"),
    [
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": 0}', True),
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": 1}', True),
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": 1.0000001}', False),
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": -0.0000001}', False),
        ('{"waiting_requests_num": -1, "gpu_cache_usage_perc": 0.5}', False),
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": 1e999}', False),
        ('{"waiting_requests_num": 0, "gpu_cache_usage_perc": -1e999}', False),
        ('{"waiting_requests_num": 123456789012345678901234567890, "gpu_cache_usage_perc": 0.5}', True),
    ],
)
def test_numbers_out_of_range_are_taken_and_make_the_load_invalid(load: str, valid: bool) -> None:
    report = parse_heartbeat(beat(load)).load
    assert report.valid is valid
    assert report.waiting_requests_num < 2**63
    # What is passed on to other replicas is as valid there as it is here.
    assert parse_load(load_document(report)).valid is valid


def test_nan_is_not_valid() -> None:
    assert not LoadReport(0, math.nan).valid


def loaded(waiting: str, usage: str) -> str:
    return f'{{"waiting_requests_num": {waiting}, "gpu_cache_usage_perc": {usage}}}'


FINE = loaded("1", "0")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            beat(loaded("1.5", "0")),
            "load_metrics.waiting_requests_num: must be an integer, not a decimal number",
        ),
        (beat(loaded("true", "0")), "load_metrics.waiting_requests_num: must be an integer, not a boolean"),
        (beat(loaded('"1"', "0")), "load_metrics.waiting_requests_num: must be an integer, not text"),
        (beat(loaded("1", '"0"')), "load_metrics.gpu_cache_usage_perc: must be a number, not text"),
        (beat(loaded("1", "null")), "load_metrics.gpu_cache_usage_perc: must be a number, not null"),
        (beat(loaded("1", "NaN")), "not JSON"),
        (beat('{"waiting_requests_num": 1}'), "load_metrics.gpu_cache_usage_perc: missing"),
        (beat("[]"), "load_metrics: must be an object"),
        (b'{"name": "a:1"}', "load_metrics: missing"),
        (b'{"load_metrics": ' + FINE.encode() + b"}", "name: missing"),
        (b'{"name": "", "load_metrics": ' + FINE.encode() + b"}", "name: 0 characters"),
        (beat(FINE, incarnation_id=4), "incarnation_id: must be text or null, not an integer"),
        (beat(FINE, latency_metrics=4), "latency_metrics: must be an object or null, not an integer"),
        (b"", "not JSON"),
    ],
)
def test_a_heartbeat_with_wrong_types_is_refused_with_the_field(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_heartbeat(body)
    assert sentence in str(caught.value)


def test_a_deletion_may_name_an_incarnation() -> None:
    assert parse_deletion(b"") is None
    assert parse_deletion(b"{}") is None
    assert parse_deletion(b'{"incarnation_id": "a"}') == "a"
    with pytest.raises(InvalidInputError):
        parse_deletion(b'{"incarnation_id": 1}')
