"""What the portal's Daphne does with applications that fail, hang or leave things behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from kvportal.server.daphne_server import BODIES_ARRIVING, SMALL_BODY_BYTES
from tests.serve.portal import Portal, environment
from tests.serve.toy import MAX_BODY_BYTES
from tests.support.waiting import wait_until


@pytest.fixture
def toy(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Portal]:
    env = environment(tmp_path, DJANGO_SETTINGS_MODULE="", **getattr(request, "param", {}))
    with Portal(tmp_path, [sys.executable, "-m", "tests.serve.toy"], env) as server:
        yield server.ready()


def ended_in_order(toy: Portal) -> bool:
    toy.signal(signal.SIGTERM)
    status = toy.ended()
    words = [line for line in toy.process.output().splitlines() if line in ("attach", "drain", "detach")]
    return status == 0 and words == ["attach", "drain", "detach"]


def test_finished_requests_are_forgotten_at_once(toy):
    with httpx.Client(base_url=toy.url) as client:
        for _ in range(50):
            assert client.get("/connections").text == "1"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: httpx.get(toy.url + "/"), range(40)))
    wait_until(lambda: httpx.get(toy.url + "/connections").text == "1", 10, "requests are remembered")
    assert ended_in_order(toy)


def test_a_client_that_goes_away_is_forgotten(toy):
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(toy.url + "/stuck", timeout=0.2)
    assert httpx.get(toy.url + "/connections").text in ("1", "2")  # the stuck application still runs
    with connect(toy.url.replace("http", "ws") + "/") as websocket:
        websocket.close()
    assert ended_in_order(toy)


def test_a_failing_application_is_a_500_and_is_logged(toy):
    for _ in range(3):
        assert httpx.get(toy.url + "/boom").status_code == 500
    assert httpx.get(toy.url + "/connections").text == "1"
    assert toy.process.output().count("RuntimeError: boom") == 3
    assert ended_in_order(toy)


def test_a_failing_websocket_application_closes_its_connection(toy):
    with connect(toy.url.replace("http", "ws") + "/boom") as websocket:
        websocket.send("x")
        with pytest.raises(ConnectionClosedError) as closed:
            websocket.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
    wait_until(lambda: httpx.get(toy.url + "/connections").text == "1", 10, "the WebSocket is remembered")
    assert ended_in_order(toy)


def test_a_body_arrives_in_one_piece_and_is_cut_a_byte_after_the_limit(toy):
    with httpx.Client(base_url=toy.url) as client:
        for size in (0, 1, 300_000, MAX_BODY_BYTES):
            assert client.post("/messages", content=b"x" * size).text == f"1 {size}"
        assert client.post("/messages", content=b"x" * (3 * MAX_BODY_BYTES)).text == f"1 {MAX_BODY_BYTES + 1}"
        chunks = iter([b"x" * 400_000] * 5)
        assert client.post("/messages", content=chunks).text == f"1 {MAX_BODY_BYTES + 1}"
        assert client.post("/messages", content=b"x").text == "1 1"


def test_tasks_and_requests_that_would_never_end_are_ended(toy):
    assert httpx.get(toy.url + "/tasks/leave").text == "ok"
    with ThreadPoolExecutor(1) as pool, connect(toy.url.replace("http", "ws") + "/") as websocket:
        websocket.send("x")
        stuck = pool.submit(httpx.get, toy.url + "/stuck", timeout=30)
        wait_until(lambda: int(httpx.get(toy.url + "/connections").text) == 3, 10, "it is not under way")
        assert ended_in_order(toy)
        with pytest.raises(httpx.RemoteProtocolError):
            stuck.result()
    assert "cuts off what is still being answered: 1 request\n" in toy.process.output()
    assert "Traceback" not in toy.process.output()


def unfinished(toy: Portal, stack: contextlib.ExitStack, size: int) -> socket.socket:
    """A request for /messages with such a body, of which the last byte is missing."""
    client = stack.enter_context(toy.connect())
    head = f"POST /messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    client.settimeout(60)
    client.sendall(head.encode() + b"x" * (size - 1))
    return client


def finished(client: socket.socket) -> bytes:
    """The last byte, and all that comes back."""
    client.sendall(b"x")
    return b"".join(iter(lambda: client.recv(65536), b""))


def arriving(toy: Portal) -> tuple[int, int]:
    """Bytes kept of unfinished bodies, and how many of these were turned away."""
    kept, turned_away = httpx.get(toy.url + "/arriving", timeout=30).text.split()
    return int(kept), int(turned_away)


def test_bodies_that_arrive_together_take_bounded_memory_and_small_ones_always_get_in(toy):
    most = BODIES_ARRIVING * MAX_BODY_BYTES
    with contextlib.ExitStack() as stack:
        clients = [unfinished(toy, stack, MAX_BODY_BYTES) for _ in range(BODIES_ARRIVING + 4)]
        wait_until(lambda: arriving(toy)[1] > 0, 30, "none is turned away")
        assert arriving(toy)[0] <= most + SMALL_BODY_BYTES * len(clients)
        assert httpx.post(toy.url + "/messages", content=b"x" * SMALL_BODY_BYTES).status_code == 200
        answers = [finished(client) for client in clients]
    assert {answer.split(None, 2)[1] for answer in answers} == {b"200", b"503"}
    refused = next(answer for answer in answers if answer.startswith(b"HTTP/1.1 503"))
    assert b'"code":"overloaded"' in refused
    assert b"retry-after: 1" in refused.lower()
    assert arriving(toy) == (0, 0)
    assert httpx.post(toy.url + "/messages", content=b"x" * MAX_BODY_BYTES).text == f"1 {MAX_BODY_BYTES}"
    assert ended_in_order(toy)


def test_the_body_of_a_client_that_goes_away_is_forgotten(toy):
    with contextlib.ExitStack() as stack:
        unfinished(toy, stack, MAX_BODY_BYTES)
        wait_until(lambda: arriving(toy)[0] == MAX_BODY_BYTES - 1, 30, "it does not arrive")
    wait_until(lambda: arriving(toy) == (0, 0), 30, "it is kept")
    assert ended_in_order(toy)


@pytest.mark.parametrize("toy", [{"TOY_ARRIVAL": "0.5"}], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"Content-Length: 9\r\n\r\n12345678"], ids=["head", "body"])
def test_a_request_that_does_not_arrive_is_given_up(toy, sent):
    with toy.connect() as client:
        client.settimeout(30)
        client.sendall(b"POST /messages HTTP/1.1\r\nHost: x\r\n" + sent)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    wait_until(lambda: arriving(toy) == (0, 0), 30, "it is kept")
    assert ended_in_order(toy)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_form_is_the_business_of_the_application(toy, kind):
    """Twisted would read it on the event loop, for seconds, before anybody asked who sent it."""
    part = '--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
    body = part if kind.startswith("multipart") else "a=1&b=2"
    headers = {"Content-Type": kind}
    assert httpx.post(toy.url + "/fields", content=body, headers=headers).text == "0"
    assert httpx.post(toy.url + "/messages", content=body, headers=headers).text == f"1 {len(body)}"


def test_a_connection_that_an_answer_calls_closed_is_closed(toy):
    with toy.connect() as client:
        client.settimeout(30)
        client.sendall(b"GET /refusal HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/root?a=/b", ""),
        ("http://x:1/root?a=/b", ""),
        ("/root?a=/b", "Daphne-Root-Path: /elsewhere\r\n"),
        ("/root?a=/b", "Daphne-Root-Path: \xff\r\n"),
    ],
)
def test_clients_may_name_the_whole_url_but_not_the_root_path(toy, target, header):
    with toy.connect() as client:
        client.settimeout(30)
        client.sendall(
            f"GET {target} HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n".encode("latin-1")
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"'' b'a=/b'" in answer


@pytest.mark.parametrize("target", ["http://[/", "*", "nowhere", "http:///x"])
def test_a_strange_target_is_the_business_of_the_application(toy, target):
    with toy.connect() as client:
        client.settimeout(30)
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert ended_in_order(toy)
