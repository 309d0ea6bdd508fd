"""What the portal's Daphne does with applications that fail, hang or leave things behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from tests.serve.portal import Portal, environment
from tests.serve.toy import MAX_BODY_BYTES
from tests.support.waiting import wait_until


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Portal]:
    env = environment(tmp_path, DJANGO_SETTINGS_MODULE="")
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
    assert "1 requests were still being answered and are cut off" in toy.process.output()
    assert "Traceback" not in toy.process.output()
