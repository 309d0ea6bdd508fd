"""What only the ASGI side has to handle: bodies in pieces, clients that go away or stop in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.core.asgi import get_asgi_application

from kvportal.fastpath import FastPath
from streams import http
from streams.http import Response
from tests.http import shells
from tests.http.shells import JSON, MAX_BODY, chunks, converse, with_token

QUERY = "/v1/internal/kv-cache/query"
STREAMS = "/v1/internal/streams"
INSTANCE = "/v1/internal/instances/a:1"
HEADERS = with_token(JSON, shells.TOKEN)
GONE = {"type": "http.disconnect"}


async def no_django(scope, receive, send):
    raise AssertionError(f"{scope['path']} fell through to Django")


async def not_read():
    raise AssertionError("the body was read")


@pytest.mark.parametrize("cut", [0, 1, 14, 22])
def test_a_body_in_pieces_is_one_body(portal, cut):
    body = b'{"token_ids":[1,2,300]}'
    messages = chunks(body[:cut], body[cut:], b"")
    answer = converse("POST", QUERY, HEADERS, messages, FastPath(no_django, max_body_bytes=MAX_BODY))
    assert answer is not None
    assert answer.status == 200
    assert portal.index.prompts == [b"\1\0\0\0\2\0\0\0\x2c\1\0\0"]


def test_a_message_without_body_field_counts_as_empty(portal):
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "more_body": True},
        {"type": "http.request", "body": b"{}"},
    ]
    answer = converse("POST", QUERY, HEADERS, messages)
    assert answer is not None
    assert answer.code == "invalid_field"


def test_a_client_that_goes_away_in_the_middle_is_not_answered_and_nothing_is_asked(portal):
    complete_so_far = b'{"token_ids":[1,2]}'
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": complete_so_far, "more_body": True},
        GONE,
    ]
    assert converse("POST", QUERY, HEADERS, messages) is None
    assert portal.index.prompts == []


def test_a_body_that_stops_arriving_is_given_up(portal):
    application = FastPath(no_django, max_body_bytes=MAX_BODY, body_seconds=0.01)
    messages = [{"type": "http.request", "body": b'{"token', "more_body": True}]
    answer = converse("POST", QUERY, HEADERS, messages, application)
    assert answer is not None
    assert (answer.status, answer.code) == (408, "body_timeout")
    assert answer.headers["connection"] == "close"
    counted = 'kvportal_http_responses_total{endpoint="query",status="408"} 1.0'
    assert counted in portal.metrics.render().decode()


@pytest.mark.parametrize(("method", "path"), [("POST", QUERY), ("PUT", INSTANCE), ("POST", "/admin/login/")])
def test_a_body_that_grows_too_long_is_refused_without_being_announced(portal, method, path):
    endless = iter(lambda: {"type": "http.request", "body": b" " * 4096, "more_body": True}, None)
    answer = converse(method, path, HEADERS, endless)
    assert answer is not None
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


def test_an_answer_that_has_begun_is_finished_although_the_body_grows_too_long():
    async def early(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] == "http.request":
            pass
        await send({"type": "http.response.body", "body": b"done"})

    endless = iter(lambda: {"type": "http.request", "body": b" " * 4096, "more_body": True}, None)
    answer = converse("POST", "/admin/", HEADERS, endless, FastPath(early, max_body_bytes=MAX_BODY))
    assert answer is not None
    assert (answer.status, answer.body) == (200, b"done")


@pytest.mark.parametrize(("method", "path"), [("POST", QUERY), ("PUT", INSTANCE)])
def test_a_body_that_is_announced_as_too_long_is_not_read(portal, method, path):
    announced = HEADERS | {"content-length": str(MAX_BODY + 1)}
    unread = iter(())  # reading would wait for ever
    answer = converse(method, path, announced, unread)
    assert answer is not None
    assert answer.status == 413


@pytest.mark.parametrize("length", ["", "-1", "ten", "1,2", "٣", "0" * 5000])
def test_a_content_length_that_is_no_number_is_ignored(portal, length):
    headers = [(k.encode(), v.encode()) for k, v in (HEADERS | {"content-length": length}).items()]
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"token_ids":[]}'}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": QUERY, "headers": headers}
    asyncio.run(FastPath(no_django, max_body_bytes=MAX_BODY)(scope, receive, send))
    assert sent[0]["status"] == 200


def test_unauthorized_bodies_are_not_read(portal):
    answer = converse("POST", QUERY, JSON, iter(()))
    assert answer is not None
    assert answer.status == 401


def test_two_tokens_in_one_request_are_no_token(portal):
    valid = shells.TOKEN.encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"x-internal-token", valid),
        (b"x-internal-token", valid),
    ]
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": QUERY, "headers": headers}
    asyncio.run(FastPath(no_django, max_body_bytes=MAX_BODY)(scope, not_read, send))
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("first", ["", "nonsense"])
def test_what_comes_before_a_valid_token_is_not_overlooked_in_either_shell(portal, first):
    headers = JSON | {"x-internal-token": first}
    django: Any = get_asgi_application()
    for application in (FastPath(no_django, max_body_bytes=MAX_BODY), django):
        answer = converse(
            "POST",
            QUERY,
            headers,
            chunks(b'{"token_ids":[]}'),
            application,
            again={"x-internal-token": shells.TOKEN},
        )
        assert answer is not None
        assert answer.status == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_head_announces_the_length_that_get_has(ask, portal, path):
    lengths = []
    for method in ("GET", "HEAD"):
        answer = ask(method, path)
        assert bool(answer.body) == (method == "GET")
        lengths.append({key.lower(): value for key, value in answer.headers.items()}["content-length"])
    assert lengths[0] == lengths[1] != "0"


def test_probes_do_not_need_django(portal):
    application = FastPath(no_django, max_body_bytes=MAX_BODY)
    for path in ("/livez", "/readyz"):
        for method in ("GET", "HEAD"):
            answer = converse(method, path, {}, [], application)
            assert answer is not None
            assert answer.status == 200


def test_one_request_too_many_is_turned_away_and_places_come_back():
    async def ask(receive):
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
        scope = {"type": "http", "method": "POST", "path": QUERY, "headers": headers}
        await FastPath(no_django, max_body_bytes=MAX_BODY)(scope, receive, send)
        return sent[0]["status"] if sent else None

    async def at_once():
        return {"type": "http.request", "body": b'{"token_ids":[1]}'}

    async def scenario():
        arrives = asyncio.Event()

        async def late():
            await arrives.wait()
            return await at_once()

        slow = [asyncio.create_task(ask(late)) for _ in range(2)]
        await asyncio.sleep(0)  # both have their place now and wait for their body
        refused = await ask(at_once)
        arrives.set()
        served = [await task for task in slow]
        gone = asyncio.create_task(ask(asyncio.Event().wait))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return refused, served, [await ask(at_once) for _ in range(3)]

    with shells.portal(max_readers=2):
        assert asyncio.run(scenario()) == (503, [200, 200], [200, 200, 200])


def test_a_turned_away_request_says_so_in_both_shells():
    with shells.portal(max_readers=1) as made:
        assert made.guard.places.acquire(blocking=False)
        for ask in (shells.ask_fast, shells.ask_django):
            answer = ask("POST", QUERY, b'{"token_ids":[1]}', JSON)
            assert (answer.status, answer.code) == (503, "overloaded")
        made.guard.places.release()


def test_what_is_installed_is_looked_up_for_each_request():
    class Fixed:
        def admit(self, head):
            return Response(200, b"1")

    try:
        http.install({"livez": Fixed()})
        assert shells.ask_fast("GET", "/livez").body == b"1"
        http.install({})
        assert shells.ask_fast("GET", "/livez").status == 503
    finally:
        http.install({})
