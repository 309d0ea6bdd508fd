"""The same requests through the fast route and through Django: the same answers, byte for byte."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvportal.fastpath import PROGRESS_PREFIX, PROGRESS_SUFFIX, ROUTES
from tests.http import shells
from tests.http.shells import JSON, MAX_BODY, MAX_TOKENS, Facts

QUERY = "/v1/internal/kv-cache/query"
SELECT = "/v1/internal/routing/select"
HEARTBEAT = "/v1/internal/instances/heartbeat"
PROGRESS = "/v1/internal/routing/requests/r-1/progress"
INSTANCE = "/v1/internal/instances/10.0.0.7:8000"
STREAMS = "/v1/internal/streams"
RESYNC = "/v1/internal/streams/resync"

TEXT = {"content-type": "text/plain"}

# what is asked (method, path, body, headers, token), and the status and error code of the answer
TABLE = {
    "query": ("POST", QUERY, b'{"token_ids":[1,2,3,4]}', JSON, ..., 200, None),
    "query without tokens": ("POST", QUERY, b'{"token_ids":[]}', JSON, ..., 200, None),
    "query with its charset": (
        "POST",
        QUERY,
        b'{"token_ids":[1]}',
        {"content-type": 'application/JSON; charset="UTF-8"'},
        ...,
        200,
        None,
    ),
    "select": ("POST", SELECT, b'{"token_ids":[1]}', JSON, ..., 200, None),
    "progress": ("POST", PROGRESS, b'{"action":"GENERATE"}', JSON, ..., 200, None),
    "heartbeat": ("POST", HEARTBEAT, b"{}", JSON, ..., 200, None),
    "put": ("PUT", INSTANCE, b"{}", JSON, ..., 200, None),
    "delete": ("DELETE", INSTANCE, b"", {}, ..., 200, None),
    "instances": ("GET", "/v1/internal/instances", b"", {}, ..., 200, None),
    "streams": ("GET", STREAMS, b"", {}, ..., 200, None),
    "resync": ("POST", RESYNC, b'{"dp_rank":1}', JSON, ..., 202, None),
    "schema": ("GET", "/v1/internal/schema", b"", {}, ..., 200, None),
    "no content": ("DELETE", "/v1/internal/instances/void", b"", {}, ..., 204, None),
    "livez": ("GET", "/livez", b"", {}, None, 200, None),
    "readyz": ("GET", "/readyz", b"", {}, None, 200, None),
    "livez by HEAD": ("HEAD", "/livez", b"", {}, None, 200, None),
    "no token": ("POST", QUERY, b'{"token_ids":[1]}', JSON, None, 401, "unauthorized"),
    "empty token": ("POST", QUERY, b'{"token_ids":[1]}', JSON, "", 401, "unauthorized"),
    "wrong token": ("POST", QUERY, b'{"token_ids":[1]}', JSON, "wrong", 401, "unauthorized"),
    "token of another alphabet": ("POST", SELECT, b"{}", JSON, "caf\xe9", 401, "unauthorized"),
    "schema without token": ("GET", "/v1/internal/schema", b"", {}, None, 401, "unauthorized"),
    "any path below v1": ("GET", "/v1/nope", b"", {}, ..., 404, "not_found"),
    "any path below v1, posted": ("POST", "/v1/chat/completions", b"{}", JSON, ..., 404, "not_found"),
    "any path below v1 without token": ("GET", "/v1/nope", b"", {}, None, 401, "unauthorized"),
    "v1 itself": ("GET", "/v1", b"", {}, ..., 404, "not_found"),
    "v1 itself with a slash": ("GET", "/v1/", b"", {}, ..., 404, "not_found"),
    "slash too many in front": ("POST", "/" + QUERY, b'{"token_ids":[]}', JSON, ..., 404, "not_found"),
    "slashes too many in front": ("GET", "///v1/internal/streams", b"", {}, ..., 404, "not_found"),
    "slash too many within": ("GET", "/v1//internal/streams", b"", {}, ..., 404, "not_found"),
    "unknown path without token": ("GET", "/v1/internal/nothing", b"", {}, None, 401, "unauthorized"),
    "wrong method without token": ("GET", QUERY, b"", {}, None, 401, "unauthorized"),
    "unknown path": ("GET", "/v1/internal/nothing", b"", {}, ..., 404, "not_found"),
    "unknown path, posted": ("POST", "/v1/internal/nothing", b"{}", JSON, ..., 404, "not_found"),
    "the prefix": ("GET", "/v1/internal/", b"", {}, ..., 404, "not_found"),
    "the prefix without slash": ("GET", "/v1/internal", b"", {}, ..., 404, "not_found"),
    "trailing slash": ("POST", QUERY + "/", b"{}", JSON, ..., 404, "not_found"),
    "no request_id": ("POST", "/v1/internal/routing/requests//progress", b"{}", JSON, ..., 404, "not_found"),
    "endpoint says 404": ("DELETE", "/v1/internal/instances/gone", b"", {}, ..., 404, "not_found"),
    "query by GET": ("GET", QUERY, b"", {}, ..., 405, "method_not_allowed"),
    "query by OPTIONS": ("OPTIONS", QUERY, b"", {}, ..., 405, "method_not_allowed"),
    "streams by HEAD": ("HEAD", STREAMS, b"", {}, ..., 405, None),
    "streams by POST": ("POST", STREAMS, b"{}", JSON, ..., 405, "method_not_allowed"),
    "heartbeat by PUT": ("PUT", HEARTBEAT, b"{}", JSON, ..., 405, "method_not_allowed"),
    "instance by POST": ("POST", INSTANCE, b"{}", JSON, ..., 405, "method_not_allowed"),
    "unheard-of method": ("BREW", QUERY, b"", {}, ..., 405, "method_not_allowed"),
    "livez by POST": ("POST", "/livez", b"", {}, None, 405, "method_not_allowed"),
    "text": ("POST", QUERY, b'{"token_ids":[1]}', TEXT, ..., 415, "unsupported_media_type"),
    "no content type": ("POST", QUERY, b'{"token_ids":[1]}', {}, ..., 415, "unsupported_media_type"),
    "other charset": (
        "POST",
        QUERY,
        b"{}",
        {"content-type": "application/json; charset=utf-16"},
        ...,
        415,
        "unsupported_media_type",
    ),
    "form": (
        "POST",
        SELECT,
        b"a=1",
        {"content-type": "application/x-www-form-urlencoded"},
        ...,
        415,
        "unsupported_media_type",
    ),
    "compressed": (
        "POST",
        QUERY,
        b'{"token_ids":[1]}',
        JSON | {"content-encoding": "gzip"},
        ...,
        415,
        "unsupported_media_type",
    ),
    "compressed for Django": (
        "PUT",
        INSTANCE,
        b"{}",
        JSON | {"content-encoding": "br"},
        ...,
        415,
        "unsupported_media_type",
    ),
    "not compressed, and says so": (
        "POST",
        QUERY,
        b'{"token_ids":[1]}',
        JSON | {"content-encoding": "Identity"},
        ...,
        200,
        None,
    ),
    "resync without body": ("POST", RESYNC, b"", JSON, ..., 202, None),
    "resync without body or type": ("POST", RESYNC, b"", {}, ..., 202, None),
    "query without body or type": ("POST", QUERY, b"", {}, ..., 400, "invalid_json"),
    "no object": ("POST", QUERY, b"[]", JSON, ..., 400, "invalid_field"),
    "too long": ("POST", QUERY, b" " * (MAX_BODY + 1), JSON, ..., 413, "body_too_large"),
    "too long for Django": ("PUT", INSTANCE, b" " * (MAX_BODY + 1), JSON, ..., 413, "body_too_large"),
    "too many tokens": (
        "POST",
        QUERY,
        orjson.dumps({"token_ids": [0] * (MAX_TOKENS + 1)}),
        JSON,
        ...,
        413,
        "too_many_tokens",
    ),
    "no body": ("POST", QUERY, b"", JSON, ..., 400, "invalid_json"),
    "broken body": ("POST", QUERY, b'{"token_ids":[1,', JSON, ..., 400, "invalid_json"),
    "a boolean": ("POST", QUERY, b'{"token_ids":[1,true]}', JSON, ..., 400, "invalid_field"),
    "no token_ids": ("POST", QUERY, b'{"tokens":[1]}', JSON, ..., 400, "invalid_field"),
    "unknown key in resync": ("POST", RESYNC, b'{"instance":"a"}', JSON, ..., 400, "invalid_field"),
    "resync of nobody": ("POST", RESYNC, b'{"instance_name":"x"}', JSON, ..., 404, "not_found"),
    "an exception": ("PUT", "/v1/internal/instances/boom", b"{}", JSON, ..., 500, "internal_error"),
}


def both(case: tuple) -> tuple[shells.Answer, shells.Answer]:
    method, path, body, headers, token, *_ = case
    token = shells.TOKEN if token is ... else token
    return (
        shells.ask_fast(method, path, body, headers, token),
        shells.ask_django(method, path, body, headers, token),
    )


@pytest.mark.parametrize("name", TABLE)
def test_both_shells_give_the_same_answer(name, portal):
    case = TABLE[name]
    fast, django = both(case)
    assert fast == django
    status, code = case[-2:]
    assert fast.status == status
    if code is not None:
        assert fast.code == code
        assert fast.message
        assert "Traceback" not in fast.message
        assert "secret detail" not in fast.body.decode()
    if fast.body:
        assert fast.content_type == "application/json"


@pytest.mark.parametrize("name", TABLE)
def test_a_portal_that_is_not_running_answers_503_in_both_shells(name):
    fast, django = both(TABLE[name])
    if fast.status == 413:  # refused before anything else is looked at
        return
    assert fast == django
    assert fast.status == 503
    if fast.body:
        assert fast.code == "not_ready"


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (Facts(running=True, kv_events=False), "kv_events_disabled"),
        (Facts(running=True), "not_ready"),
        (Facts(running=True, instances=1, prefill=1), "not_ready"),
        (Facts(running=False, default=1, instances=1), "not_ready"),
    ],
)
def test_query_is_refused_before_its_body_is_looked_at_while_nobody_can_serve(facts, code):
    with shells.portal(facts=facts):
        fast, django = both(("POST", QUERY, b"nonsense", JSON, ...))
    assert fast == django
    assert (fast.status, fast.code) == (503, code)


def test_select_works_without_the_index_but_not_without_instances():
    with shells.portal(facts=Facts(running=True, kv_events=False, default=1, instances=1)):
        fast, django = both(TABLE["select"])
        assert fast == django
        assert fast.status == 200
    with shells.portal(facts=Facts(running=True, kv_events=False)):
        assert both(TABLE["select"])[0].code == "not_ready"


@pytest.mark.parametrize("path", [STREAMS, "/v1/internal/instances", "/v1/internal/schema"])
def test_lists_and_schema_are_not_gated_by_readiness(path):
    with shells.portal(facts=Facts(running=True, kv_events=False)):
        fast, django = both(("GET", path, b"", {}, ...))
    assert fast == django
    assert fast.status == 200


def test_resync_is_refused_when_the_index_is_off():
    with shells.portal(facts=Facts(running=True, kv_events=False, default=1, instances=1)):
        assert both(TABLE["resync"])[1].code == "kv_events_disabled"


def test_path_parameters_reach_the_endpoint_decoded(portal):
    fast = shells.ask_fast("POST", f"{PROGRESS_PREFIX}chat/42 ü{PROGRESS_SUFFIX}", b"{}", JSON)
    django = shells.ask_django("POST", f"{PROGRESS_PREFIX}chat%2F42%20%C3%BC{PROGRESS_SUFFIX}", b"{}", JSON)
    assert fast.json["params"] == django.json["params"] == {"request_id": "chat/42 ü"}
    named = shells.ask_django("DELETE", "/v1/internal/instances/%5B::1%5D:8000")
    assert named.json["params"] == {"name": "[::1]:8000"}


def test_405_says_what_is_allowed(ask, portal):
    assert ask("POST", STREAMS, b"{}", JSON).headers["allow" if ask is shells.ask_fast else "Allow"] == "GET"
    answer = shells.ask_django("POST", INSTANCE, b"{}", JSON)
    assert answer.headers["Allow"] == "PUT, DELETE"


def test_every_fast_route_is_a_django_path_with_the_same_endpoint():
    from django.urls import resolve

    routes = {**ROUTES, ("POST", PROGRESS): "progress"}
    for (method, path), name in routes.items():
        view: Any = resolve(path).func
        assert view.cls.endpoints[method] == name


def test_errors_stay_json_with_debug_on(ask, portal, settings):
    settings.DEBUG = True
    for name in ("unknown path", "query by GET", "an exception", "the prefix without slash"):
        method, path, body, headers, _, status, code = TABLE[name]
        answer = ask(method, path, body, headers)
        assert (answer.status, answer.code, answer.content_type) == (status, code, "application/json")


@pytest.mark.parametrize("path", ["/v1/%0A", "/v1/internal/a%0Ab", "/v1/%00", "//v1/%2e%2e", "/v1/%ff%fe"])
def test_whatever_stands_below_v1_the_answer_is_json(portal, settings, path):
    settings.DEBUG = True
    for token, status in ((None, 401), (shells.TOKEN, 404)):
        answer = shells.ask_django("GET", path, token=token)
        assert (answer.status, answer.content_type) == (status, "application/json")
        assert answer.json["error"]["message"]


def test_a_path_that_only_looks_like_the_api_is_a_page_like_any_other(portal):
    assert "html" in str(shells.ask_django("GET", "/v10/").content_type)
    assert "html" in str(shells.ask_django("GET", "/admin/v1/").content_type)


def test_415_names_the_encoding(ask, portal):
    answer = ask("POST", QUERY, b"{}", JSON | {"content-encoding": "x-gzip"})
    assert answer.message == "the header Content-Encoding must be left out (or identity), found x-gzip"


def test_a_body_of_unannounced_length_still_has_to_say_what_it_is(portal):
    body = b'{"token_ids":[]}'
    for headers, status in (({}, 415), (JSON, 200)):
        answer = shells.converse("POST", QUERY, shells.with_token(headers, shells.TOKEN), shells.chunks(body))
        assert answer is not None
        assert answer.status == status


def test_answers_that_refuse_leave_no_line_each_in_the_log(ask, portal, caplog, capsys):
    names = ("no token", "unknown path", "query by GET", "streams by POST", "text", "resync of nobody")
    with caplog.at_level("INFO"):
        for name in names:
            method, path, body, headers, token, status, _ = TABLE[name]
            assert ask(method, path, body, headers, shells.TOKEN if token is ... else token).status == status
        shells.http.install({})
        assert ask("GET", STREAMS).status == 503
        assert ask("GET", "/readyz").status == 503
    assert caplog.text + capsys.readouterr().err == ""


def test_an_unexpected_failure_is_logged_once(ask, portal, caplog, capsys):
    ask("PUT", "/v1/internal/instances/boom", b"{}", JSON)
    told = caplog.text or capsys.readouterr().err  # Django takes the log over when it is set up
    assert told.count("the endpoint instance_put failed") == 1
    assert "django.request" not in told


def test_an_unexpected_host_does_not_disturb_api_and_probes(portal, settings):
    settings.ALLOWED_HOSTS = ["portal.example.com"]
    for method, path, body, headers in (
        ("GET", STREAMS, b"", {}),
        ("POST", QUERY, b'{"token_ids":[]}', JSON),
        ("GET", "/readyz", b"", {}),
        ("GET", "/metrics", b"", {}),
    ):
        for ask in (shells.ask_django, shells.ask_fast):
            assert ask(method, path, body, headers).status == 200


@pytest.mark.django_db
def test_a_signed_in_admin_is_nobody_to_the_api(portal, django_user_model, client):
    client.force_login(django_user_model.objects.create_superuser("root", "r@example.com", "x"))
    assert client.get(STREAMS).status_code == 401
    answer = client.get(STREAMS, headers={"x-internal-token": shells.TOKEN})
    assert answer.status_code == 200
    assert not answer.cookies
    assert "Vary" not in answer


def test_no_csrf_token_is_needed(portal):
    from django.test import Client

    for path in (QUERY, RESYNC, "/v1/internal/nothing"):
        answer = Client(enforce_csrf_checks=True).post(
            path, b"{}", "application/json", headers={"x-internal-token": shells.TOKEN}
        )
        assert answer.status_code != 403
        assert "json" in answer["Content-Type"]
