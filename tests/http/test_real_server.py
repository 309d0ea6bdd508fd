"""The portal's HTTP side as it really runs: a server, keep-alive connections, real streams behind it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import httpx
import pytest

from kvportal.fastpath import FastPath
from streams.directory import Directory
from streams.endpoints import query_endpoint, resync_endpoint, streams_endpoint
from streams.resync import ResyncOrder
from streams.simulator.publisher import Publisher
from streams.spec import Limits, StreamSpec
from streams.status import StreamState
from tests.http import shells
from tests.http.servers import served
from tests.http.shells import JSON, MAX_BODY, TOKEN
from tests.http.test_both_shells import QUERY, RESYNC, STREAMS, TABLE
from tests.serve.portal import Portal, environment
from tests.support.waiting import wait_until

BLOCK = 4
HEADERS = JSON | {"X-Internal-Token": TOKEN}
# The first of these is refused by the server itself; httpx takes the slashes of the others away.
NOT_SENT = {"unheard-of method", "slash too many in front", "slashes too many in front"}
OVER_HTTP = sorted(set(TABLE) - NOT_SENT)


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with served(MAX_BODY) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def daphne(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The same portal behind Daphne, which needs a process of its own: its reactor wants the main thread."""
    directory = tmp_path_factory.mktemp("daphne")
    command = [sys.executable, "-m", "tests.http.daphne_portal"]
    with (
        Portal(directory, command, environment(directory / "var")) as process,
        httpx.Client(base_url=process.ready().url, timeout=20) as client,
    ):
        yield client


def ask_server(server: httpx.Client, case: tuple) -> shells.Answer:
    method, path, body, headers, token, *_ = case
    sent = {key.encode(): value.encode() for key, value in headers.items()}
    token = TOKEN if token is ... else token
    if token is not None:
        sent[b"x-internal-token"] = token.encode("latin-1")
    answer = server.request(method, path, content=body or None, headers=sent)
    return shells.Answer(answer.status_code, answer.content, answer.headers.get("content-type"))


@pytest.mark.parametrize("name", OVER_HTTP)
def test_a_real_server_gives_the_answers_of_the_views(server, portal, name):
    method, path, body, headers, token, *_ = TABLE[name]
    expected = shells.ask_django(method, path, body, headers, TOKEN if token is ... else token)
    answer = ask_server(server, TABLE[name])
    assert answer == expected


@pytest.mark.parametrize("name", OVER_HTTP)
def test_daphne_gives_the_answers_of_the_views(daphne, portal, name):
    method, path, body, headers, token, *_ = TABLE[name]
    expected = shells.ask_django(method, path, body, headers, TOKEN if token is ... else token)
    assert ask_server(daphne, TABLE[name]) == expected


STRANGE_PATHS = [
    "/v1/%0A",
    "/v1/internal/%00",
    "/v1/%ff%fe",
    "//v1/x",
    "/v1/..%2f..%2fadmin",
    "/v1/internal/%",
]


@pytest.mark.parametrize("path", STRANGE_PATHS)
@pytest.mark.parametrize("which", ["server", "daphne"])
def test_servers_pass_strange_paths_on_to_be_answered_in_json(request, portal, which, path):
    """Sent as they are: a client library would tidy them up."""
    client = request.getfixturevalue(which)
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as connection:
        head = (
            f"GET {path} HTTP/1.1\r\nHost: portal\r\nX-Internal-Token: {TOKEN}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode())
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 404")
    assert b"application/json" in received.lower()


def test_one_connection_serves_request_after_request_whatever_the_answers_were(server, portal):
    host, port = server.base_url.host, server.base_url.port

    def request(body: bytes, token: str = TOKEN) -> bytes:
        head = f"POST {QUERY} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}X-Internal-Token: {token}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    bodies = [b'{"token_ids":[1]}', b"{", b'{"token_ids":[2]}']
    with socket.create_connection((host, port or 0), timeout=20) as connection:
        connection.sendall(
            request(bodies[0]) + request(bodies[0], "wrong") + request(bodies[1]) + request(bodies[2])
        )
        received = b""
        while received.count(b"HTTP/1.1 ") < 4 or not received.endswith(b"]}"):
            chunk = connection.recv(65536)
            assert chunk
            received += chunk
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401", b"400", b"200"]


def test_a_chunked_body_over_the_limit_is_refused(server, portal):
    for path in (QUERY, RESYNC):
        answer = server.post(path, content=iter([b" " * 8192] * 9), headers=HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def block_stored(
    hashes: list[int], tokens: list[int], parent: int | None = None, medium: str = "gpu"
) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "medium": medium,
    }


def test_answers_follow_a_real_stream(server):
    tokens = list(range(1, 13))
    held = [block_stored([11, 12], tokens[:8])]
    with Publisher(topic="kv", snapshot=lambda: held) as engine:
        directory = Directory(Limits(resync_interval_ms=600_000))
        directory.start()
        try:
            directory.set_desired(
                [StreamSpec("e:1", 0, engine.endpoint, engine.replay_endpoint, block_size=BLOCK, topic="kv")]
            )

            def order(placed: ResyncOrder) -> int:
                (target,) = placed.targets
                return len(directory.resync(instance_name=target.instance_name, drop=placed.drop))

            real = {
                "query": query_endpoint(directory, max_query_tokens=1000),
                "streams": streams_endpoint(directory.statuses),
                "resync": resync_endpoint(directory.statuses, order),
            }

            def stream() -> dict:
                return server.get(STREAMS, headers=HEADERS).json()["streams"][0]

            def match() -> dict:
                return server.post(QUERY, json={"token_ids": tokens}, headers=HEADERS).json()["matches"][0]

            with shells.portal(endpoints=real):
                wait_until(lambda: stream()["state"] == StreamState.SYNCHRONIZED, 20)
                assert (match()["device_hit_tokens"], match()["host_only_hit_tokens"]) == (8, 0)

                engine.publish([block_stored([13], tokens[8:], parent=12, medium="cpu")])
                wait_until(lambda: match()["host_only_hit_tokens"] == 4, 20)
                assert (match()["device_hit_tokens"], match()["device_blocks"], match()["host_blocks"]) == (
                    8,
                    2,
                    1,
                )

                before = stream()["last_snapshot"]["count"]
                held.append(block_stored([13], tokens[8:], parent=12))
                answer = server.post(RESYNC, json={"instance_name": "e:1"}, headers=HEADERS)
                assert (answer.status_code, answer.json()) == (202, {"streams": 1})
                wait_until(lambda: stream()["last_snapshot"]["count"] > before, 20)
                assert (match()["device_hit_tokens"], match()["host_only_hit_tokens"]) == (12, 0)
        finally:
            directory.stop()


def test_the_application_is_what_servers_get():
    from kvportal.asgi import application

    assert isinstance(application._http, FastPath)
