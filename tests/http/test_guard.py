"""The guard: tokens, hosts, failures."""

from __future__ import annotations

import logging

import pytest

from kvportal.guard import Guard, GuardSettings, is_json, is_own_host
from kvportal.metrics import Metrics
from streams.http import NOT_FOUND, ApiError, Head, Response, announced_length
from tests.http import shells
from tests.http.shells import JSON

STREAMS = "/v1/internal/streams"
HEARTBEAT = "/v1/internal/instances/heartbeat"


def test_several_tokens_are_valid_at_once(ask):
    with shells.portal(tokens=("old", "new", "n\xfcw")):
        for token in ("old", "new"):
            assert ask("GET", STREAMS, token=token).status == 200
        for token in ("", "ol", "oldnew", "old,new", "OLD", " old2"):
            assert ask("GET", STREAMS, token=token).status == 401


def test_a_token_beyond_ascii_is_compared_by_its_bytes():
    guard = Guard(GuardSettings(tokens=("wörter",)), gates={}, observer=Metrics())
    head = Head("GET", STREAMS, ("GET",), token="wörter".encode())
    assert guard.who_refuses(head) is None
    assert guard.who_refuses(Head("GET", STREAMS, ("GET",), token="wörter".encode("latin-1"))) is not None


def test_without_tokens_nobody_is_asked_for_one(ask):
    with shells.portal(tokens=()):
        assert ask("GET", STREAMS, token=None).status == 200
        assert ask("POST", HEARTBEAT, b"{}", JSON, token="any").status == 200


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("portal.example.com", True),
        ("PORTAL.example.com:8888", True),
        ("127.0.0.1:8888", True),
        ("10.1.2.3", True),
        ("[::1]:8888", True),
        ("", True),
        ("evil.example.com", False),
        ("evil.example.com:8888", False),
        ("127.0.0.1.evil.example.com", False),
        ("portal.example.com.evil", False),
        ("not a host", False),
        ("\xff", False),
    ],
)
def test_only_names_of_this_server_are_own_hosts(host, own):
    assert is_own_host(host, ("portal.example.com",)) is own


def test_without_a_token_a_foreign_host_name_is_refused(ask):
    foreign, own = JSON | {"host": "evil.example.com"}, JSON | {"host": "localhost:8888"}
    with shells.portal(tokens=(), allowed_hosts=("localhost",)):
        answer = ask("POST", HEARTBEAT, b"{}", foreign, token=None)
        assert (answer.status, answer.code) == (400, "invalid_host")
        assert ask("POST", HEARTBEAT, b"{}", own, token=None).status == 200
    with shells.portal(tokens=("t",), allowed_hosts=("localhost",)):
        assert ask("POST", HEARTBEAT, b"{}", foreign, token="t").status == 200


@pytest.mark.parametrize(
    ("content_type", "accepted"),
    [
        ("application/json", True),
        ("Application/JSON ; charset=UTF-8", True),
        ('application/json;charset="utf-8"', True),
        ("application/json; boundary=x", True),
        ("application/json;", True),
        ("application/json; charset=latin-1", False),
        ("application/jsonp", False),
        ("text/json", False),
        ("", False),
    ],
)
def test_json_in_utf_8_is_the_only_content_type(content_type, accepted):
    assert is_json(content_type) is accepted


def test_what_goes_wrong_is_logged_and_not_told(ask, portal, caplog):
    with caplog.at_level(logging.ERROR, logger="kvportal.guard"):
        answer = shells.ask_django("PUT", "/v1/internal/instances/boom", b'{"token_ids":[424242]}', JSON)
    assert answer.status == 500
    assert answer.message == "the portal failed on this request; its log says why"
    assert "secret detail" in caplog.text
    assert "424242" not in caplog.text


def test_a_path_that_is_no_unicode_is_refused_like_any_other():
    guard = Guard(GuardSettings(), gates={}, observer=Metrics())
    admission = guard.wrap({})[NOT_FOUND].admit(Head("GET", "/v1/internal/\udcff", ()))
    assert not isinstance(admission, Response)
    with admission:
        answer = admission.answer(b"")
    assert answer.status == 404
    assert b"/v1/internal/?" in answer.body


@pytest.mark.parametrize(
    ("text", "length"),
    [("", None), ("7", 7), ("007", 7), ("+7", None), ("7_0", None), ("9" * 5000, 10**18 - 1)],
)
def test_an_announced_length_is_a_number_or_nothing(text, length):
    assert announced_length(text) == length


def test_a_gate_that_fails_is_a_failure_and_keeps_no_place(caplog):
    def gate() -> ApiError | None:
        raise RuntimeError("secret detail")

    guard = Guard(GuardSettings(max_readers=1), gates={"a": gate}, observer=Metrics())
    (guarded, *_) = guard.wrap({"a": lambda request: Response(200)}).values()
    for _ in range(3):
        answer = guarded.admit(Head("GET", "/a", ("GET",)))
        assert isinstance(answer, Response)
        assert answer.status == 500
    assert guard.places.acquire(blocking=False)


def test_answers_are_counted_by_endpoint_and_status(ask, portal):
    ask("GET", STREAMS)
    ask("GET", STREAMS)
    ask("GET", STREAMS, token="wrong")
    ask("PUT", "/v1/internal/instances/boom", b"{}", JSON)
    ask("POST", HEARTBEAT, b" " * (shells.MAX_BODY + 1), {"content-type": "application/json"})
    counted = portal.metrics.registry.get_sample_value
    name = "kvportal_http_responses_total"
    assert counted(name, {"endpoint": "streams", "status": "200"}) == 2
    assert counted(name, {"endpoint": "streams", "status": "401"}) == 1
    assert counted(name, {"endpoint": "instance_put", "status": "500"}) == 1
    assert counted(name, {"endpoint": "heartbeat", "status": "413"}) == 1
