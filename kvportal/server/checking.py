"""`manage.py serve --check`: tries what the portal needs, each once, and prints a line for each."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

import zmq
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, Error, connections

from kvportal.config.endpoints import endpoint_key
from kvportal.config.model import Config
from kvportal.database import first_line, missing_migrations, why_unusable
from kvportal.parts import etcd_settings
from kvportal.process import ProcessError, prepare_process
from kvportal.server import Output
from kvportal.server.listening import ListenError, listen, url
from kvportal.server.uvicorn_server import UvicornMissingError, require_uvicorn
from routing.instances.etcd import EtcdClient
from routing.instances.etcd_wire import EtcdRefusedError, EtcdUnavailableError
from streams.sockets import SnapshotSocket
from streams.spec import Limits
from streams.wording import counted

OK, DOUBTFUL, FAILED = "ok", "warn", "FAIL"
CONNECT_SECONDS = 3.0
AT_ONCE = 32


class FailedError(Exception):
    """An attempt failed; the text says how."""


class DoubtfulError(Exception):
    """An attempt did not succeed, but may later without any change here; the text says how it went."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One thing to try. `run` returns what to say of it, or raises FailedError or DoubtfulError."""

    name: str
    run: Callable[[], str]


def check(config: Config, output: Output) -> bool:
    """Tries everything; whether all of it is in order. Doubts do not count as disorder."""
    for notice in config.notices:
        output.write(f"note  {notice}")
    attempts = list(_attempts(config))
    in_order = True
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for attempt, (verdict, text) in zip(attempts, pool.map(_try, attempts), strict=True):
            output.write(f"{verdict:5} {attempt.name}: {text}")
            in_order = in_order and verdict != FAILED
    return in_order


def _try(attempt: Attempt) -> tuple[str, str]:
    try:
        return OK, attempt.run()
    except DoubtfulError as error:
        return DOUBTFUL, str(error)
    except FailedError as error:
        return FAILED, str(error)


def _attempts(config: Config) -> Iterator[Attempt]:
    yield Attempt("process", partial(_process, config))
    yield Attempt("server", partial(_server, config))
    yield Attempt("database", _database)
    redis_url = settings.SITE.redis_url
    if redis_url:
        yield Attempt(f"redis {_place(redis_url)}", partial(_redis, redis_url))
    if config.instance_source == "etcd":
        for address in config.etcd_addrs:
            yield Attempt(f"etcd {address}", partial(_etcd, config, address))
    if config.kv_events:
        limits = config.kv_events.limits
        for spec in config.kv_events.streams:
            events, replay = spec.endpoint, spec.replay_endpoint
            yield Attempt(f"stream {spec.id} events {events}", partial(_connect, events))
            yield Attempt(f"stream {spec.id} replay {replay}", partial(_replay, replay, limits))


def _process(config: Config) -> str:
    streams = config.kv_events.limits.max_streams if config.kv_events else 0
    try:
        prepare_process(streams)
    except ProcessError as error:
        raise FailedError(str(error)) from error
    return f"files and sockets suffice for {counted(streams, 'stream')}"


def _server(config: Config) -> str:
    try:
        if config.server == "uvicorn":
            require_uvicorn()
        listen(config.server_host, config.http_server_port).close()
    except (ListenError, UvicornMissingError) as error:
        raise FailedError(str(error)) from error
    return f"{config.server} can listen on {url(config.server_host, config.http_server_port)}"


def _database() -> str:
    vendor = connections[DEFAULT_DB_ALIAS].vendor
    try:
        missing = missing_migrations()
    except Error as error:
        raise FailedError(why_unusable(error) or f"{vendor} does not answer: {first_line(error)}") from error
    if missing:
        raise FailedError(f"{vendor} lacks {len(missing)} migrations: run manage.py migrate --noinput")
    return f"{vendor} answers, all migrations are applied"


def _redis(redis_url: str) -> str:
    import redis

    try:
        with redis.Redis.from_url(
            redis_url, socket_timeout=CONNECT_SECONDS, socket_connect_timeout=CONNECT_SECONDS
        ) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        raise FailedError(first_line(error)) from error
    return "answers"


def _place(address: str) -> str:
    """Where a URL points, without user and password."""
    parts = urlsplit(address)
    return parts.netloc.rpartition("@")[2] or parts.path


def _etcd(config: Config, address: str) -> str:
    client = None
    try:
        client = EtcdClient(replace(etcd_settings(config), endpoints=(address,)))
        client.get("kvportal-check")
    except (EtcdUnavailableError, EtcdRefusedError, OSError, ssl.SSLError) as error:
        raise FailedError(first_line(error)) from error
    finally:
        if client is not None:
            client.close()
    return "answers"


def _connect(endpoint: str) -> str:
    try:
        socket.create_connection(endpoint_key(endpoint), CONNECT_SECONDS).close()
    except OSError as error:
        raise FailedError(f"no connection: {error.strerror or error}") from error
    return "accepts connections"


def _replay(endpoint: str, limits: Limits) -> str:
    """Asks for one snapshot, as a stream would, and waits for the beginning of the answer."""
    _connect(endpoint)
    deadline = time.monotonic() + limits.replay_timeout_ms / 1000
    with zmq.Context() as context:
        asking = SnapshotSocket(context, endpoint, limits.max_message_bytes)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if asking.socket.poll(max(1, int(left * 1000))) and asking.receive() is not None:
                    return "answers a snapshot request"
        finally:
            asking.close()
    raise DoubtfulError("accepts TCP but does not answer a snapshot request")
