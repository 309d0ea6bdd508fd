"""The routing page tells the truth: its numbers are computed, its example is run."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from routing.endpoints import progress_endpoint, select_endpoint
from routing.policies import car
from routing.policies.decision import Policy, Settings
from routing.selector import Selector
from tests.http import shells
from tests.http.servers import served
from tests.routing.builders import instance, match, situation
from tests.routing.fakes import FixedIndex, FixedRegistry

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "gateway.py"


@pytest.mark.parametrize(("prefill_lambda", "winner"), [(0.5, "B"), (0.75, "A")])
def test_worked_example_has_the_right_numbers(prefill_lambda, winner):
    page = (DOCS / "routing.md").read_text()
    decision = car.decide(
        situation(
            instance("A", "PREFILL", waiting=6),
            instance("B", "PREFILL", waiting=2, dp_size=2),
            instance("C", "PREFILL", waiting=8),
            instance("D", "DECODE", waiting=1, usage=0.5),
            instance("E", "DECODE", waiting=4, usage=0.25),
            tokens=4096,
            hits=[
                match("A", device=3072, host=512),
                match("B", 0, device=4096),
                match("B", 1, device=1024, host=1024),
                match("C", device=4096, synchronized=False),
            ],
            car_prefill_lambda=prefill_lambda,
        )
    )
    assert decision.prefill is not None
    assert decision.decode is not None
    assert (decision.prefill.instance.name, decision.decode.instance.name) == (winner, "D")
    for candidate in (*decision.prefill_candidates[:2], *decision.decode_candidates):
        assert f"{candidate.score:g}" in page
    if prefill_lambda == 0.5:
        assert [c.score for c in decision.prefill_candidates] == [0.46875, 0.4375, 1.0]
        assert [c.score for c in decision.decode_candidates] == [0.75, 1.25]


def test_example_has_at_most_thirty_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 30


class Engine(BaseHTTPRequestHandler):
    """Answers a completion as an OpenAI-compatible engine does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "X-Internal-Token" not in self.headers
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        answer = json.dumps({"choices": [{"text": body["prompt"].upper()}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def load_example(monkeypatch: pytest.MonkeyPatch, url: str) -> ModuleType:
    monkeypatch.setenv("KVPORTAL_URL", url)
    monkeypatch.setenv("KVPORTAL_INTERNAL_API_TOKEN", shells.TOKEN)
    spec = importlib.util.spec_from_file_location("gateway_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def endpoints(selector: Selector) -> dict[str, object]:
    return {
        "select": select_endpoint(selector, max_query_tokens=shells.MAX_TOKENS),
        "progress": progress_endpoint(selector),
    }


def test_example_gateway_asks_serves_and_reports(engine, monkeypatch):
    registry = FixedRegistry(instance(engine))
    selector = Selector(Settings(policy=Policy.CAR), registry, FixedIndex([match(engine, device=4)]))
    with shells.portal(endpoints=endpoints(selector)), served(shells.MAX_BODY) as url:
        answer = load_example(monkeypatch, url).complete("hello", [1, 2, 3, 4, 5])
    assert answer["choices"][0]["text"] == "HELLO"
    assert selector.open_request_num() == 0
    (errors,) = selector.errors.read()
    assert (errors.instance_name, errors.error_sum) == (engine, 1)


def test_example_gateway_takes_a_request_back_that_failed(monkeypatch):
    nobody = "127.0.0.1:1"
    selector = Selector(Settings(), FixedRegistry(instance(nobody)))
    with shells.portal(endpoints=endpoints(selector)), served(shells.MAX_BODY) as url:
        gateway = load_example(monkeypatch, url)
        with pytest.raises(OSError, match="refused"):
            gateway.complete("hello", [1])
    assert selector.totals().decisions == 1
    assert selector.open_request_num() == 0
