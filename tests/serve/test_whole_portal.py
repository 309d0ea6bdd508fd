"""Every part wired together: real engines' streams in, answers over HTTP out, through the real server."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.supervisor import free_ports
from streams.simulator import Publisher
from streams.simulator.messages import block_stored
from tests.instances.support import closed_port
from tests.serve.portal import CHECKOUT, Portal
from tests.support.waiting import wait_until

SIZE = 4
TOKENS = list(range(8))
HELD = [block_stored([1, 2], None, TOKENS, SIZE)]
HEADERS = {"X-Internal-Token": "t"}


class Api:
    """The internal API of a portal."""

    def __init__(self, portal: Portal) -> None:
        self.client = httpx.Client(base_url=portal.url, headers=HEADERS, timeout=20)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(f"/v1/internal/{path}", json=body)

    def get(self, path: str) -> Any:
        return self.client.get(f"/v1/internal/{path}").json()

    def hits(self) -> dict[str, int]:
        """Tokens of TOKENS that each synchronized stream holds."""
        answer = self.post("kv-cache/query", {"token_ids": TOKENS}).json()
        return {
            match["instance_name"]: match["device_hit_tokens"]
            for match in answer.get("matches", [])
            if match["synchronized"]
        }

    def register(self, name: str, **fields: Any) -> httpx.Response:
        body = {"name": name, "type": 0, "incarnation_id": "one", "dp_size": 1, "ttl_s": 60, **fields}
        return self.client.put(f"/v1/internal/instances/{name}", json=body)

    def heartbeat(self, name: str) -> httpx.Response:
        load = {"waiting_requests_num": 0, "gpu_cache_usage_perc": 0.5}
        return self.post("instances/heartbeat", {"name": name, "incarnation_id": "one", "load_metrics": load})


@pytest.fixture
def engine() -> Iterator[Publisher]:
    with Publisher(topic="xllm-kv", snapshot=lambda: HELD) as publisher:
        yield publisher


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def written(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document))
    return f"--kv-events-config-file={path}"


@pytest.mark.parametrize("server", ["daphne", "uvicorn"])
def test_static_streams_are_followed_and_answer_queries(data_dir, tmp_path, engine, server):
    stream = {
        "instance_name": "a",
        "block_size": SIZE,
        "topic": "xllm-kv",
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
    }
    config = written(tmp_path / "kv.json", {"streams": [stream]})
    with Portal.serve(data_dir, config, f"--server={server}", KVPORTAL_INTERNAL_API_TOKEN="t") as portal:
        api = Api(portal.ready())
        with api.client:
            wait_until(lambda: api.hits() == {"a": 8}, 20, lambda: str(api.get("streams")))
            wait_until(lambda: portal.answers("/readyz"), 20, "it does not become ready")
            assert api.post("streams/resync", {"instance_name": "a"}).json() == {"streams": 1}
            refused = api.post("routing/select", {"token_ids": TOKENS})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "no_candidates"
            assert 'kvportal_stream_synchronized{dp_rank="0",instance_name="a"} 1.0' in (
                httpx.get(portal.url + "/metrics").text
            )
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0
        assert "Traceback" not in portal.process.output()
        assert "cut short" not in portal.process.output()


def test_instances_that_register_are_discovered_and_chosen_by_what_they_hold(data_dir, tmp_path, engine):
    # The engine's ports are the system's choice, so the offsets of the shipped example are replaced by
    # those that lead from a registered port to them.
    example = json.loads((CHECKOUT / "deploy/examples/kv_events_discovery_config.json").read_text())
    ports = port_of(engine.endpoint), port_of(engine.replay_endpoint)
    base = min(ports) - 1
    example["discovery"] |= {
        "block_size": SIZE,
        "event_port_offset": ports[0] - base,
        "replay_port_offset": ports[1] - base,
    }
    [elsewhere] = free_ports(1)
    holder, other = (
        f"127.0.0.1:{base}",
        f"localhost:{elsewhere - 20_000 if elsewhere > 30_000 else elsewhere}",
    )
    config = written(tmp_path / "kv.json", example)
    flags = ("--load-balance-policy=CAR", "--car-prefill-lambda=1", config)
    with Portal.serve(data_dir, *flags, KVPORTAL_INTERNAL_API_TOKEN="t") as portal:
        api = Api(portal.ready())
        with api.client:
            assert api.post("kv-cache/query", {"token_ids": []}).json()["error"]["code"] == "not_ready"
            for name in (holder, other):
                assert api.register(name).status_code == 204
                assert api.heartbeat(name).status_code == 204
            wait_until(lambda: api.hits() == {holder: 8}, 20, lambda: str(api.get("streams")))
            instances = api.get("instances")["instances"]
            assert [(each["name"], each["state"]) for each in instances] == [
                (holder, "ACTIVE"),
                (other, "ACTIVE"),
            ]
            selected = api.post("routing/select", {"token_ids": TOKENS, "request_id": "r-1"}).json()
            assert selected.get("policy") == "CAR", selected
            assert selected["prefill"]["instance_name"] == holder
            assert selected["prefill"]["kv_hit_ratio"] == 1
            finish = {"action": "FINISH_PREFILL", "cached_tokens": 8}
            assert api.post("routing/requests/r-1/progress", finish).status_code == 204
            assert api.client.delete(f"/v1/internal/instances/{holder}").status_code == 204
            wait_until(lambda: holder not in api.hits(), 20, "the deleted instance is still followed")
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0
        assert "Traceback" not in portal.process.output()


@pytest.mark.parametrize("document", [{}, {"streams": []}, {"discovery": {}}])
def test_an_events_file_that_follows_nothing_makes_nothing_ready(data_dir, tmp_path, document):
    config = written(tmp_path / "kv.json", document)
    with Portal.serve(data_dir, config, KVPORTAL_INTERNAL_API_TOKEN="t") as portal:
        api = Api(portal.ready())
        with api.client:
            refused = api.post("kv-cache/query", {"token_ids": []})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            told = httpx.get(portal.url + "/readyz")
            assert told.status_code == 503
            sentence = "the KV events file neither enables discovery nor names streams"
            assert sentence in refused.json()["error"]["message"]
            assert sentence in told.text
            assert "NOTHING IS FOLLOWED" in portal.process.output()
            assert api.register("127.0.0.1:8000").status_code == 204
            assert api.post("kv-cache/query", {"token_ids": []}).json() == {"matches": []}
            assert portal.answers("/readyz")
        assert "django.request" not in portal.process.output()


def test_a_portal_without_etcd_says_so_and_stops_in_time(data_dir, tmp_path):
    flags = ("--instance-source=etcd", "--etcd-addr")
    with (
        closed_port() as port,
        Portal.serve(data_dir, *flags, f"127.0.0.1:{port}", KVPORTAL_INTERNAL_API_TOKEN="t") as portal,
    ):
        api = Api(portal.ready())
        with api.client:
            source = api.get("instances")["source"]
            assert (source["kind"], source["connected"]) == ("etcd", False)
            assert api.register("127.0.0.1:8000").status_code == 409
            assert portal.answers("/livez")
        portal.signal(signal.SIGTERM)
        assert portal.ended() == 0
        assert "cut short" not in portal.process.output()
