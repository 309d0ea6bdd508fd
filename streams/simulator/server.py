"""A simulated engine as a whole: ranks, load, and the HTTP port that real engines have.

`GET /health` is open to everybody, as the portal probes it. Everything else is the control channel and
answers loopback clients only: `GET /state`, `GET /faults` (what can be ordered), `POST /faults` (an order,
see `orders`), `GET /prompts` (popular prompts and what each rank holds of them).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import random
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

from streams.simulator.engine import EngineConfig, SimulatedEngine, configure
from streams.simulator.load import Load, LoadModel
from streams.simulator.orders import OrderError, catalogue, take_order

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 1024
_HANG_S = 60.0
_LOWEST_PORT = 1024
_PORT_ATTEMPTS = 100
_POLL_S = 0.05


class EngineServer:
    """One engine with its HTTP port; owns the engine that it is given.

    `health`, `heartbeats` and `load` are changed by orders and read by whoever reports to the portal.
    """

    def __init__(self, engine: SimulatedEngine, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine = engine
        self.load = LoadModel(seed=engine.seed)
        self.health = "ok"
        self.heartbeats = True
        self._process = secrets.token_urlsafe(12)
        self.closing = threading.Event()
        self._http = _HttpServer(host, port, self)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_S,), name="sim-http", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(
        cls,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        event_port_offset: int = 10_000,
        replay_port_offset: int = 30_000,
        seed: int = 0,
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> Self:
        """An engine whose event and replay ports lie at fixed offsets from its HTTP port.

        With port 0, an HTTP port is found for which all of them are free. A port in use is an `OSError`.
        """
        config = configure(config or EngineConfig(), **settings, host=host)
        highest = 65_535 - config.dp_size + 1 - max(event_port_offset, replay_port_offset)
        if not port and highest < _LOWEST_PORT + _PORT_ATTEMPTS:
            raise ValueError(f"the offsets leave ports up to {highest} only; name a port, or lower them")
        candidates = [port] if port else random.sample(range(_LOWEST_PORT, highest + 1), _PORT_ATTEMPTS)
        for attempt, candidate in enumerate(candidates, start=1):
            here = configure(
                config,
                event_port=candidate + event_port_offset,
                replay_port=candidate + replay_port_offset,
            )
            try:
                return cls._open_at(here, seed, host, candidate)
            except OSError:
                if attempt == len(candidates):
                    raise
        raise AssertionError("the last attempt returns or raises")

    @property
    def port(self) -> int:
        """HTTP port."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """Where it can be reached on this machine, `http://host:port`."""
        host = str(self._http.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def incarnation_id(self) -> str:
        """Identity of the present life; another one after each restart."""
        return f"{self._process}-{self.engine.lives}"

    def next_load(self) -> Load:
        """The load to report in the next heartbeat."""
        usages = [rank.device_usage() for rank in self.engine.ranks]
        return self.load.next(sum(usages) / len(usages))

    def state(self) -> dict[str, Any]:
        """What the engine is doing, as JSON."""
        return {
            "incarnation_id": self.incarnation_id,
            "health": self.health,
            "heartbeats": self.heartbeats,
            "events_per_second": self.engine.rate,
            "ranks": [rank.state() for rank in self.engine.ranks],
        }

    def prompts(self) -> dict[str, Any]:
        """Popular prompts as token IDs, with the hits that the truth of each rank gives."""
        truths = [rank.truth() for rank in self.engine.ranks]
        prompts = self.engine.ranks[0].popular_prompts()
        return {
            "prompts": [
                {
                    "token_ids": prompt,
                    "ranks": [
                        dict(
                            zip(
                                ("device_hit_tokens", "host_only_hit_tokens"), truth.hits(prompt), strict=True
                            )
                        )
                        for truth in truths
                    ],
                }
                for prompt in prompts
            ]
        }

    def close(self) -> None:
        """Close the HTTP port and the engine. May be called twice."""
        if not self.closing.is_set():
            self.closing.set()
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _open_at(cls, config: EngineConfig, seed: int, host: str, port: int) -> Self:
        engine = SimulatedEngine(seed=seed, config=config)
        try:
            return cls(engine, host=host, port=port)
        except BaseException:
            engine.close()
            raise


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, engine_server: EngineServer) -> None:
        self.engine_server = engine_server
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on http://{host}:{port}: {error.strerror}") from error

    def server_bind(self) -> None:
        # The library's own asks the name service who we are, which can take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # a client that did not wait is no error
            log.error("request of %s failed", client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = 10
    server_version = "simulated-engine"
    pages: ClassVar[dict[str, Callable[[EngineServer], object]]] = {
        "/state": lambda server: server.state(),
        "/faults": lambda server: {"faults": catalogue()},
        "/prompts": lambda server: server.prompts(),
    }

    def do_GET(self) -> None:
        if self.path == "/health":
            self._health()
        elif self.path not in self.pages:
            self._refuse(HTTPStatus.NOT_FOUND, "not_found", f"there is /health, {', '.join(self.pages)}")
        elif self._may_control():
            self._answer(HTTPStatus.OK, self.pages[self.path](self.server.engine_server))

    def do_POST(self) -> None:
        if self.path != "/faults":
            self._refuse(HTTPStatus.NOT_FOUND, "not_found", "orders are posted to /faults")
        elif self._may_control():
            self._take_order()

    def _health(self) -> None:
        engine = self.server.engine_server
        if engine.health == "hang":
            engine.closing.wait(_HANG_S)
            self.close_connection = True
        elif engine.health == "error":
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "unhealthy", "made to fail by an order")
        else:
            self._answer(HTTPStatus.OK, {"status": "ok"})

    def _take_order(self) -> None:
        body = self._body()
        if body is None:
            return
        try:
            done = take_order(self.server.engine_server, json.loads(body))
        except OrderError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, "bad_order", str(error))
        except OSError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "failed", str(error))
        except (ValueError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, "bad_json", f"the body is not JSON: {error}")
        else:
            self._answer(HTTPStatus.OK, done)

    def _body(self) -> bytes | None:
        """The request's body; None when it was refused. The type keeps web pages from posting here."""
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else 0
        # Read before refusing: closing with data unread would reset the connection and lose the answer.
        body = self.rfile.read(min(size, _MAX_BODY_BYTES * 4))
        if self.headers.get_content_type() != "application/json":
            self._refuse(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "bad_type", "Content-Type: must be application/json"
            )
            return None
        if not 0 < size <= _MAX_BODY_BYTES:
            allowed = f"Content-Length: found {length!r}; allowed: 1 to {_MAX_BODY_BYTES}"
            self._refuse(HTTPStatus.BAD_REQUEST, "bad_length", allowed)
            return None
        return body

    def _may_control(self) -> bool:
        if ipaddress.ip_address(self.client_address[0]).is_loopback:
            return True
        self._refuse(
            HTTPStatus.FORBIDDEN, "not_loopback", "the control channel answers loopback clients only"
        )
        return False

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        self._answer(status, {"error": {"code": code, "message": message}})

    def _answer(self, status: HTTPStatus, value: object) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Probes come every second; they are not news."""
