"""The HTTP port of a simulated engine: health, state, orders."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from streams.simulator.engine import SimulatedEngine
from streams.simulator.orders import HEALTH_MODES, ORDERS
from streams.simulator.server import EngineServer
from tests.simulator.peers import END, peer
from tests.support.waiting import wait_until


@pytest.fixture
def server() -> Iterator[EngineServer]:
    engine = SimulatedEngine(seed=1, dp_size=2, block_size=4, device_blocks=60, host_blocks=20, topic="kv")
    with EngineServer(engine) as each:
        engine.step(30)
        yield each


@pytest.fixture
def client(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as each:
        yield each


def order(client: httpx.Client, fault: str, **parameters: Any) -> httpx.Response:
    return client.post("/faults", json={"fault": fault, **parameters})


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def test_health_is_good_until_ordered_otherwise(server: EngineServer, client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert order(client, "health", mode="error").status_code == 200
    assert client.get("/health").status_code == 503
    order(client, "health", mode="hang")
    with pytest.raises(httpx.ReadTimeout):
        client.get("/health", timeout=0.2)
    order(client, "health", mode="ok")
    assert client.get("/health").status_code == 200


def test_state_tells_what_each_rank_holds(server: EngineServer, client: httpx.Client) -> None:
    state = client.get("/state").json()
    assert state["incarnation_id"] == server.incarnation_id
    for rank in range(2):
        shown, truth = state["ranks"][rank], server.engine.truth(rank)
        assert shown["device_blocks"] == truth.device_blocks + truth.opaque_blocks
        assert shown["host_blocks"] == truth.host_blocks
        assert (shown["endpoint"], shown["next_sequence"]) == (server.engine.endpoint(rank), 30)


def test_prompts_come_with_their_true_hits(server: EngineServer, client: httpx.Client) -> None:
    prompts = client.get("/prompts").json()["prompts"]
    assert any(rank["device_hit_tokens"] for each in prompts for rank in each["ranks"])
    for each in prompts:
        hits = [server.engine.truth(rank).hits(each["token_ids"]) for rank in range(2)]
        assert [tuple(rank.values()) for rank in each["ranks"]] == hits


def test_the_catalogue_lists_every_order_with_what_is_allowed(client: httpx.Client) -> None:
    listed = {each["fault"]: each for each in client.get("/faults").json()["faults"]}
    assert listed.keys() == ORDERS.keys()
    assert "silent" in listed["snapshots"]["parameters"]["kind"]["allowed"]


def test_orders_reach_the_wire(server: EngineServer, client: httpx.Client) -> None:
    publisher = server.engine.ranks[1].publisher
    with peer() as reader:
        reader.subscribe(publisher, topic="")
        assert order(client, "skip_sequence", count=3, rank=1).json() == {
            "fault": "skip_sequence", "count": 3, "rank": 1,
        }  # fmt: skip
        order(client, "malformed", kind="other_topic", rank=1)
        assert reader.receive()[0] == b"other"
        order(client, "clear", rank=1)
        assert reader.sequences(1) == [33]
        assert server.engine.truth(1).device_blocks == 0 < server.engine.truth(0).device_blocks
        order(client, "lose_messages", count=2, rank=1)
        server.engine.step(rank=1)
        assert reader.sequences(1) == [36]
        order(client, "flood", messages=10, rank=1)
        assert reader.sequences(10) == list(range(37, 47))
        order(client, "snapshots", kind="stale", behind=40, times=1, rank=1)
        assert reader.snapshot(publisher)[0][1] == (6).to_bytes(8, "big")
        order(client, "snapshots", kind="end_only")
        assert len(reader.snapshot(publisher)) == 1
        order(client, "snapshots", kind="good")
        assert [part[1] for part in reader.snapshot(publisher)] == [(46).to_bytes(8, "big"), END]
        order(client, "drop_connection", rank=1)
        wait_until(lambda: publisher.subscribers == 0)
        reader.wait_for_subscription(publisher)


def test_a_restart_changes_the_incarnation(server: EngineServer, client: httpx.Client) -> None:
    before = server.incarnation_id
    order(client, "restart", visible=False)
    assert server.incarnation_id != before
    assert server.engine.truth(0).device_blocks == 0


def test_traffic_load_and_heartbeats_follow_orders(server: EngineServer, client: httpx.Client) -> None:
    server.engine.start(0)
    order(client, "rate", events_per_second=5000)
    wait_until(lambda: server.engine.ranks[0].publisher.next_sequence > 60)
    order(client, "load", waiting_requests_num=77)
    assert server.next_load().waiting_requests_num == 77
    order(client, "load", waiting_requests_num=None)
    loads = [server.next_load() for _ in range(100)]
    assert {load.waiting_requests_num for load in loads} > {3}
    assert all(load.waiting_requests_num >= 0 <= load.gpu_cache_usage_perc <= 1 for load in loads)
    order(client, "heartbeats")
    assert not server.heartbeats


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ([], "must be a JSON object"),
        ({}, "fault: found None; allowed: skip_sequence, "),
        ({"fault": "nothing"}, "fault: found 'nothing'; allowed: "),
        ({"fault": "skip_sequence", "n": 1}, "n: unknown for skip_sequence; allowed: count, rank"),
        ({"fault": "skip_sequence", "count": 0}, "count: found 0; allowed: an integer from 1 to"),
        ({"fault": "skip_sequence", "count": True}, "count: found True; allowed: an integer"),
        ({"fault": "skip_sequence", "count": 1.0}, "count: found 1.0; allowed: an integer"),
        ({"fault": "skip_sequence", "count": None}, "count: found None; allowed: an integer"),
        ({"fault": "skip_sequence", "rank": 2}, "rank: found 2; this engine has ranks 0 to 1"),
        ({"fault": "skip_sequence", "rank": -1}, "rank: found -1; allowed: an integer from 0 or null"),
        ({"fault": "health", "mode": "ill"}, f"allowed: one of {', '.join(HEALTH_MODES)}"),
        ({"fault": "rate", "events_per_second": "9"}, "events_per_second: found '9'; allowed: a number"),
        ({"fault": "drop_connection", "live": 1}, "live: found 1; allowed: true or false"),
        ({"fault": "drop_connection", "live": False, "replay": False}, "at least one must be true"),
    ],
)
def test_a_wrong_order_names_the_field_and_changes_nothing(
    server: EngineServer, client: httpx.Client, body: Any, text: str
) -> None:
    before = client.get("/state").json()
    answer = client.post("/faults", json=body)
    assert answer.status_code == 400
    assert text in message(answer)
    assert client.get("/state").json() == before


def test_requests_that_are_no_orders_are_refused(client: httpx.Client) -> None:
    json_type = {"Content-Type": "application/json"}
    assert client.post("/faults", content=b"{", headers=json_type).status_code == 400
    assert client.post("/faults", content=b"\xff", headers=json_type).status_code == 400
    assert client.post("/faults", content=b"[" * 60_000, headers=json_type).status_code == 400
    assert client.post("/faults", content=b" " * 70_000, headers=json_type).status_code == 400
    assert client.post("/faults", data={"fault": "restart"}).status_code == 415
    assert client.post("/other", json={}).status_code == 404
    assert client.get("/other").status_code == 404
    assert client.put("/faults", json={}).status_code == 501


def test_only_loopback_clients_may_control() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    with EngineServer(SimulatedEngine(), host="0.0.0.0") as server:
        url = f"http://{address}:{server.port}"
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            for answer in (client.get("/state"), order(client, "restart")):
                assert answer.status_code == 403
                assert "loopback" in message(answer)
        assert httpx.get(f"http://127.0.0.1:{server.port}/state", trust_env=False).status_code == 200


def own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def test_ports_lie_at_their_offsets_from_the_http_port() -> None:
    with EngineServer.open(dp_size=2, event_port_offset=11, replay_port_offset=21) as server:
        assert server.engine.endpoint(1) == f"tcp://127.0.0.1:{server.port + 12}"
        assert server.engine.replay_endpoint(0) == f"tcp://127.0.0.1:{server.port + 21}"
        with pytest.raises(OSError, match="cannot listen on"):
            EngineServer.open(port=server.port, event_port_offset=100, replay_port_offset=200)


def test_close_leaves_no_thread_even_when_a_probe_hangs() -> None:
    before = threading.active_count()
    server = EngineServer(SimulatedEngine(dp_size=2))
    server.health = "hang"
    with socket.create_connection(("127.0.0.1", server.port)) as probe:
        probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        wait_until(lambda: threading.active_count() > before + 3)
        server.close()
        server.close()
        assert probe.recv(1) == b""
    wait_until(lambda: threading.active_count() == before)
