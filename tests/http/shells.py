"""A portal without streams or engines, and the ways to ask it.

The index and the streams are plain values; the guard, the registry of endpoints, both shells and Django
are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from django.core.asgi import get_asgi_application
from django.test import Client

from kvportal.fastpath import FastPath
from kvportal.guard import Guard, GuardSettings
from kvportal.health import Facts, Readiness
from kvportal.metrics import Metrics, Sources
from kvportal.schema import schema_endpoint
from streams import http
from streams.endpoints import query_endpoint, resync_endpoint, streams_endpoint
from streams.http import ApiError, Endpoint, Request, Response, json_response
from streams.resync import ResyncOrder, matching
from streams.spec import StreamSpec
from streams.status import Fault, Match, SnapshotInfo, StreamState, StreamStatus

TOKEN = "correct horse"
MAX_BODY = 64 * 1024
MAX_TOKENS = 1000
JSON = {"content-type": "application/json"}


def spec(name: str = "10.0.0.7:8000", rank: int = 0, **fields: Any) -> StreamSpec:
    port = 20000 + 2 * rank
    return StreamSpec(name, rank, f"tcp://10.0.0.7:{port}", f"tcp://10.0.0.7:{port + 1}", **fields)


def status(of: StreamSpec, state: StreamState = StreamState.SYNCHRONIZED, **fields: Any) -> StreamStatus:
    serves = state is StreamState.SYNCHRONIZED
    values: dict[str, Any] = {
        "since": 1_760_000_000.25,
        "error": None if serves else Fault("sequence_gap", "message 5 is missing"),
        "warning": None,
        "sequence": 17 if serves else None,
        "device_blocks": 3 if serves else 0,
        "host_blocks": 2 if serves else 0,
        "mapped_blocks": 6,
        "last_event_at": 1_760_000_001.5,
        "lag_seconds": 0.002,
        "last_snapshot": SnapshotInfo(1_760_000_000.0, 12, 4096, 0.05, 2) if serves else None,
        "counters": {"messages": 9, "events:BlockStored": 7, "resyncs:start": 1, "gaps": 0},
    }
    return StreamStatus(spec=of, state=state, **(values | fields))


@dataclass
class PlainIndex:
    """Claims to hold the first half of every prompt; remembers what it was asked."""

    statuses_now: tuple[StreamStatus, ...] = ()
    prompts: list[bytes] = field(default_factory=list)
    orders: list[ResyncOrder] = field(default_factory=list)

    def query(self, prompt: bytes) -> Sequence[Match]:
        self.prompts.append(prompt)
        return [self._match(one, len(prompt) // 4) for one in self.statuses_now]

    def _match(self, one: StreamStatus, tokens: int) -> Match:
        serves = one.state is StreamState.SYNCHRONIZED
        return Match(
            one.spec,
            serves,
            one.sequence,
            tokens // 2 if serves else 0,
            tokens // 4 if serves else 0,
            one.device_blocks,
            one.host_blocks,
            one.error,
        )

    def statuses(self) -> tuple[StreamStatus, ...]:
        return self.statuses_now

    def order(self, order: ResyncOrder) -> int:
        self.orders.append(order)
        return len(matching(order.targets, (one.spec.id for one in self.statuses_now)))


@dataclass
class Portal:
    """What is installed while a test runs."""

    index: PlainIndex
    guard: Guard
    metrics: Metrics
    facts: Facts

    def endpoint_echo(self, request: Request) -> Response:
        """Stands for endpoints of other parts: shows what reached it."""
        if request.params.get("name") == "gone":
            raise ApiError(404, "not_found", "no instance gone")
        if request.params.get("name") == "boom":
            raise RuntimeError("secret detail")
        if request.params.get("name") == "void":
            return Response(204)
        return json_response(
            {"params": dict(request.params), "body": request.body.decode(), "method": request.method}
        )


ECHOING = ("select", "progress", "heartbeat", "instances", "instance_put", "instance_delete")


@contextmanager
def portal(
    *,
    facts: Facts | None = None,
    index: PlainIndex | None = None,
    endpoints: Mapping[str, Endpoint] | None = None,
    **settings: Any,
) -> Iterator[Portal]:
    """Installs a portal for the length of the block; `endpoints` take the place of its own."""
    index = index or PlainIndex(
        (
            status(spec(incarnation="Zq3")),
            status(spec(rank=1), StreamState.UNSYNCHRONIZED),
        )
    )
    allowed: dict[str, Any] = {"tokens": (TOKEN,), "max_body_bytes": MAX_BODY} | settings
    metrics = Metrics(policy="CAR")
    metrics.watch(Sources(statuses=index.statuses))
    made = Portal(
        index,
        Guard(GuardSettings(), gates={}, observer=metrics),
        metrics,
        facts or Facts(running=True, default=1, instances=1, desired_streams=2, synchronized_streams=2),
    )
    readiness = Readiness(lambda: made.facts)
    made.guard = Guard(
        GuardSettings(**allowed),
        gates={
            "query": readiness.query_gate,
            "select": readiness.serving_gate,
            "resync": readiness.index_gate,
        },
        observer=metrics,
    )
    named: dict[str, Endpoint] = {
        "query": query_endpoint(index, max_query_tokens=MAX_TOKENS),
        "streams": streams_endpoint(index.statuses),
        "resync": resync_endpoint(index.statuses, index.order, clock=lambda: 1_760_000_000.0),
        "schema": schema_endpoint,
        **dict.fromkeys(ECHOING, made.endpoint_echo),
        **(endpoints or {}),
    }
    http.install(made.guard.wrap(named, opened={**readiness.opened, **metrics.opened}))
    try:
        yield made
    finally:
        http.install({})


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str | None
    headers: Mapping[str, str] = field(compare=False, default_factory=dict)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]

    @property
    def message(self) -> str:
        return self.json["error"]["message"]


def ask_django(
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    token: str | None = TOKEN,
) -> Answer:
    """Through Django's test client: middleware, URLs and the DRF view."""
    sent = with_token(headers, token)
    kind = sent.pop("content-type", "")
    if path.startswith("//"):  # to the test client, what follows would be a host
        path = "http://testserver" + path
    response = Client(raise_request_exception=False).generic(
        method, path, body, kind, headers=sent, CONTENT_TYPE=kind
    )
    return Answer(
        response.status_code, response.content, response.get("Content-Type"), dict(response.items())
    )


def ask_fast(
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    token: str | None = TOKEN,
) -> Answer:
    """Through the ASGI application that servers run, with Django behind it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    length = {"content-length": str(len(body))} if body else {}
    answer = converse(method, path, with_token(headers, token) | length, messages)
    assert answer is not None
    return answer


def with_token(headers: Mapping[str, str] | None, token: str | None) -> dict[str, str]:
    sent = {"host": "testserver", **(headers or {})}
    return sent if token is None else sent | {"x-internal-token": token}


def converse(
    method: str,
    path: str,
    headers: Mapping[str, str],
    messages: Iterable[Mapping[str, Any]],
    application: Any = None,
    *,
    again: Mapping[str, str] | None = None,
) -> Answer | None:
    """One ASGI conversation. After `messages` nothing more arrives; None when nothing was answered.
    `again`: headers that come behind the others, also under the same names."""
    django: Any = get_asgi_application()
    application = application or FastPath(django, max_body_bytes=MAX_BODY)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (k.lower().encode(), v.encode("latin-1")) for k, v in (*headers.items(), *(again or {}).items())
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    sent: list[Mapping[str, Any]] = []
    arriving = iter(messages)

    async def receive() -> MutableMapping[str, Any]:
        for message in arriving:
            return dict(message)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(application(scope, receive, send))
    if not sent:
        return None
    headers_sent = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Answer(sent[0]["status"], body, headers_sent.get("content-type"), headers_sent)


def chunks(*parts: bytes) -> list[dict[str, Any]]:
    return [
        {"type": "http.request", "body": part, "more_body": position < len(parts) - 1}
        for position, part in enumerate(parts)
    ]


__all__ = ["JSON", "MAX_BODY", "MAX_TOKENS", "TOKEN", "Answer", "Facts", "Fault", "StreamState"]
