"""Reading prompts and small objects."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.body import (
    MAX_TOKEN_ID,
    flag_field,
    int_field,
    read_object,
    read_prompt,
    text_field,
)
from streams.http import ApiError
from tests.http import reference_body

LIMIT = 8


def outcome(body: bytes, max_tokens: int = LIMIT) -> list[int] | tuple[int, str]:
    try:
        result = read_prompt(body, max_tokens=max_tokens)
    except ApiError as error:
        return error.status, error.code
    ids = np.frombuffer(result.prompt, "<u4").tolist()
    assert len(ids) == result.count
    return ids


def refusal(body: bytes, max_tokens: int = LIMIT) -> str:
    with pytest.raises(ApiError) as caught:
        read_prompt(body, max_tokens=max_tokens)
    return caught.value.message


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, MAX_TOKEN_ID),
    st.sampled_from(
        [-1, 0, MAX_TOKEN_ID, MAX_TOKEN_ID + 1, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
tokens = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=LIMIT + 2)
token_fields = st.one_of(tokens, st.lists(st.integers(0, MAX_TOKEN_ID) | values, max_size=LIMIT + 2), values)
names = st.sampled_from(["token_ids", "request_id", "é", "token_ids ", ""])
objects = st.lists(st.tuples(names, token_fields), max_size=4) | st.tuples(
    st.tuples(st.just("token_ids"), tokens)
).map(list)


def written(pairs: list[tuple[str, object]], ascii_only: bool, spaced: bool, mark: bool) -> bytes:
    """The object as JSON; a list of pairs, so that a key may come twice."""
    colon, comma = (" : ", " ,\n\t") if spaced else (":", ",")
    members = (
        json.dumps(key, ensure_ascii=ascii_only)
        + colon
        + json.dumps(value, ensure_ascii=ascii_only, separators=(comma, colon))
        for key, value in pairs
    )
    return (b"\xef\xbb\xbf" if mark else b"") + ("{" + comma.join(members) + "}").encode()


documents = st.builds(written, objects, st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=500, deadline=None)
@given(documents)
def test_documents_are_read_as_a_naive_reader_reads_them(body):
    assert outcome(body) == reference_body.read(body, LIMIT)


FRAGMENTS = [
    b"\\",
    b'"',
    b"[",
    b"]",
    b"[]",
    b"{",
    b"}",
    b",",
    b":",
    b"-",
    b".",
    b"e1",
    b"00",
    b"NaN",
    b"1e999",
    b"Infinity",
    b"true",
    b"nul",
    b"/**/",
]
FRAGMENTS += [b"\x00", b"\x1f", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0041"]


@st.composite
def damaged(draw):
    body = draw(documents)
    at = draw(st.integers(0, len(body)))
    until = draw(st.integers(at, min(len(body), at + 4)))
    fragment = draw(st.binary(max_size=3) | st.sampled_from(FRAGMENTS))
    return body[:at] + fragment + body[until:]


@settings(max_examples=1000, deadline=None)
@given(damaged())
@example(b'{"token_ids":[[1,2],[]]}')
@example(b'{"token_ids":[1,[],2]}')
@example(b'{"token_ids":[[[]]]}')
@example(b'{"token_ids":[-0]}')
@example(b'{"token_ids":[1],"token_ids":[1]}')
@example(b'{"token_ids":[1],"tok\\u0065n_ids":[1]}')
@example(b'{"tok\\u0065n_ids":[1]}')
@example(b'{"token_ids":[1],"note":"[ and ["}')
@example(b'{"token_ids":[1],"note":"\\ud83d\\ude00"}')
@example(b'{"token_ids":[1],"note":"\\ud83d"}')
@example(b'{"token_ids":[1]}\x00')
@example(b"\xef\xbb\xbf\xef\xbb\xbf{}")
@example(b"")
def test_damaged_documents_are_judged_as_a_naive_reader_judges_them(body):
    assert outcome(body) == reference_body.read(body, LIMIT)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40))
def test_random_bytes_are_judged_as_a_naive_reader_judges_them(body):
    assert outcome(body) == reference_body.read(body, LIMIT)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"true", "the boolean true"),
        (b"false", "the boolean false"),
        (b"null", "null"),
        (b"1.0", "the float 1.0"),
        (b"1e2", "the float 100.0"),
        (b"-1", "-1"),
        (b"2147483648", "2147483648"),
        (b"18446744073709551616", "18446744073709551616"),
        (b'"7"', "a string of 1 characters"),
        (b'""', "an empty string"),
        (b"[5]", "a list"),
        (b"[]", "a list"),
        (b"{}", "an object"),
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_a_wrong_element_is_named_by_its_position(value, found, position):
    elements = [b"1", b"2", b"3", b"4", b"true"]
    elements[position] = value
    message = refusal(b'{"token_ids":[' + b",".join(elements) + b"]}")
    assert message == f"token_ids[{position}] must be an integer from 0 to 2147483647, found {found}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b" \r\n", "the body is empty; it must be a JSON object"),
        (b'{"token_ids":\n[1 2]}', "the body is not valid JSON: Expecting ',' delimiter at line 2, column 4"),
        (b'{"token_ids":[NaN]}', "the body is not valid JSON: NaN is no JSON value"),
        (b'{"a":"\xff"}', "the body is not UTF-8: byte 6 does not fit"),
        (b"[1]", "the body must be a JSON object, found a list"),
        (b'"a secret prompt"', "the body must be a JSON object, found a string of 15 characters"),
        (b'{"token_ids":[],"token_ids":[]}', "the key token_ids appears twice in the body"),
        (b'{"token_ids":[],"a":1,"a":1}', "the key a appears twice in the body"),
        (b"{}", "token_ids is missing; it must be a list of token IDs"),
        (b'{"token_ids":null}', "token_ids must be a list of token IDs, found null"),
        (b'{"token_ids":{"0":1}}', "token_ids must be a list of token IDs, found an object"),
        (b'{"token_ids":7}', "token_ids must be a list of token IDs, found 7"),
        (
            b'{"token_ids":[1,2,3,4,5,6,7,8,9]}',
            "token_ids must hold at most 8 token IDs (KVPORTAL_MAX_QUERY_TOKENS)",
        ),
        (b'{"token_ids":[' + b"9" * 5000 + b"]}", "the body holds a number with too many digits"),
        (b'{"token_ids":' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_every_other_fault_has_its_sentence(body, message):
    assert refusal(body) == message


@pytest.mark.parametrize("read", [read_object, lambda body: read_prompt(body, max_tokens=8)])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"NaN", "invalid_json"),
        *((text, "invalid_field") for text in (b"null", b"true", b"1", b"1.5", b'"x"', b"[]", b"[{}]")),
        (b'{"a":1,"a":2}', "invalid_field"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_field"),
        (b'{"a":' + b"9" * 5000 + b"}", "invalid_field"),
    ],
)
def test_only_what_is_no_json_at_all_is_called_so(read, body, code):
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize("rest", [b"1e999", b"18446744073709551616", b'"\\ud800"', b"[" * 1100 + b"]" * 1100])
def test_what_goes_beyond_plain_json_is_refused_even_in_keys_that_are_ignored(rest):
    assert outcome(b'{"token_ids":[1],"other":' + rest + b"}") == (400, "invalid_field")


def test_a_very_long_body_is_refused_by_its_commas_before_it_is_parsed():
    many = b"0," * (3 * 1024 * 1024)
    assert outcome(b'{"token_ids":[' + many + b"0]", 300_000) == (413, "too_many_tokens")  # no JSON even
    assert outcome(b'{"token_ids":[1],"text":"' + many + b'"}', 300_000) == (413, "too_many_tokens")


def test_long_but_sparse_bodies_are_read():
    padding = 5 * 1024 * 1024
    assert outcome(b'{"token_ids":[1],"text":"' + b"x" * padding + b'"}') == [1]
    assert outcome(b'{"token_ids":[1, ' + b" " * padding + b"2]}") == [1, 2]


def test_a_long_body_that_is_no_json_is_not_searched_for_the_place():
    body = b'{"token_ids":[' + b"0," * 300_000
    assert refusal(body, 300_000) == "the body is not valid JSON"


def test_too_many_keys_are_refused():
    body = json.dumps({"token_ids": [], **{str(n): n for n in range(300)}}).encode()
    assert outcome(body, 100_000) == (400, "invalid_field")


def test_other_fields_are_handed_over_as_plain_values_and_unknown_ones_left_out():
    body = b'{"request_id":"r[1]","token_ids":[7],"explain":true,"more":[1],"deep":{"a":[null]},"skip":1}'
    result = read_prompt(body, max_tokens=8, fields=("request_id", "explain", "more", "deep", "absent"))
    assert result.fields == {"request_id": "r[1]", "explain": True, "more": [1], "deep": {"a": [None]}}
    assert result.prompt == b"\7\0\0\0"


def test_a_refusal_that_is_kept_does_not_disturb_the_next_request():
    kept = []
    for body in (b'{"token_ids":[1.5]}', b"{", b"[]", b'{"token_ids":[[1]]}'):
        with pytest.raises(ApiError) as caught:
            read_prompt(body, max_tokens=8)
        kept.append(caught)
        assert outcome(b'{"token_ids":[1]}') == [1]


def test_bodies_of_every_size_come_out_whole_and_packed():
    for count in (0, 1, 512, 131_072, 262_144):
        ids = np.arange(count, dtype="<u4") * 7919 % 150_000
        body = json.dumps({"token_ids": ids.tolist()}).encode()
        result = read_prompt(body, max_tokens=262_144)
        assert result.prompt == ids.tobytes()


def test_threads_that_read_at_once_do_not_mix_their_prompts():
    wrong: list[int] = []

    def work(seed):
        ids = [(seed * 1_000_003 + n) % MAX_TOKEN_ID for n in range(300)]
        body = json.dumps({"token_ids": ids}).encode()
        expected = np.array(ids, "<u4").tobytes()
        wrong.extend(1 for _ in range(300) if read_prompt(body, max_tokens=300).prompt != expected)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "the body must be a JSON object, found a list"),
        (b"", "the body is empty; it must be a JSON object"),
        (b" \r\n", "the body is empty; it must be a JSON object"),
        (b'{"a":1,"a":2}', "the key a appears twice in the body"),
        (b'{"c":1}', "c is not a field here; known are a, b"),
        (b'{"a":Infinity}', "the body is not valid JSON: Infinity is no JSON value"),
    ],
)
def test_small_objects_are_read_strictly(body, message):
    with pytest.raises(ApiError) as caught:
        read_object(body, known=("a", "b"))
    assert (caught.value.status, caught.value.message) == (400, message)


def test_small_objects_have_a_size():
    with pytest.raises(ApiError) as caught:
        read_object(b'{"a":1}', max_bytes=6)
    assert caught.value.status == 413
    assert read_object(b'{"a":1}', max_bytes=7) == {"a": 1}


def test_without_a_list_of_known_keys_all_are_taken():
    assert read_object(b'{"cache_event":[],"n":1267650600228229401496703205376}') == {
        "cache_event": [],
        "n": 2**100,
    }


@pytest.mark.parametrize("value", ["", "x" * 257, 1, True, [], {}, "\ud800"])
def test_text_must_be_short_and_unicode(value):
    with pytest.raises(ApiError, match="request_id must be a string of 1 to 256 characters, found "):
        text_field({"request_id": value}, "request_id")


@pytest.mark.parametrize("value", [-1, 11, True, 1.0, "1", []])
def test_integers_must_be_integers_within_their_bounds(value):
    with pytest.raises(ApiError, match="n must be an integer from 0 to 10, found "):
        int_field({"n": value}, "n", maximum=10)


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_flags_must_be_booleans(value):
    with pytest.raises(ApiError, match="drop must be true or false, found "):
        flag_field({"drop": value}, "drop")


@pytest.mark.parametrize("fields", [{}, {"x": None}])
def test_absent_and_null_are_the_same(fields):
    assert text_field(fields, "x") is None
    assert int_field(fields, "x") is None
    assert flag_field(fields, "x", default=True) is True
    for read in (text_field, int_field):
        with pytest.raises(ApiError, match="x must be "):
            read(fields, "x", required=True)
