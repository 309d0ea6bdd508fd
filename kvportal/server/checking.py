"""`manage.py serve --check`: tries what the portal needs, each once, and prints a line for each."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, Error, connections

from kvportal.config.endpoints import endpoint_key
from kvportal.config.model import Config
from kvportal.database import first_line, missing_migrations
from kvportal.parts import etcd_settings
from kvportal.process import ProcessError, prepare_process
from kvportal.server import Output
from kvportal.server.listening import ListenError, listen, url
from kvportal.server.uvicorn_server import UvicornMissingError, require_uvicorn
from routing.instances.etcd import EtcdClient
from routing.instances.etcd_wire import EtcdRefusedError, EtcdUnavailableError

CONNECT_SECONDS = 3.0
AT_ONCE = 32


class FailedError(Exception):
    """An attempt failed; the text says how."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One thing to try. `run` returns what to say of it, or raises FailedError."""

    name: str
    run: Callable[[], str]


def check(config: Config, output: Output) -> bool:
    """Tries everything; whether all of it is in order."""
    for notice in config.notices:
        output.write(f"note  {notice}")
    attempts = list(_attempts(config))
    in_order = True
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for attempt, (good, text) in zip(attempts, pool.map(_try, attempts), strict=True):
            output.write(f"{'ok   ' if good else 'FAIL '} {attempt.name}: {text}")
            in_order = in_order and good
    return in_order


def _try(attempt: Attempt) -> tuple[bool, str]:
    try:
        return True, attempt.run()
    except FailedError as error:
        return False, str(error)


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
    for spec in config.kv_events.streams if config.kv_events else ():
        for kind, endpoint in (("events", spec.endpoint), ("replay", spec.replay_endpoint)):
            yield Attempt(f"stream {spec.id} {kind} {endpoint}", partial(_stream, endpoint))


def _process(config: Config) -> str:
    streams = config.kv_events.limits.max_streams if config.kv_events else 0
    try:
        prepare_process(streams)
    except ProcessError as error:
        raise FailedError(str(error)) from error
    return f"files and sockets suffice for {streams} streams"


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
        raise FailedError(f"{vendor} does not answer: {first_line(error)}") from error
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


def _stream(endpoint: str) -> str:
    try:
        socket.create_connection(endpoint_key(endpoint), CONNECT_SECONDS).close()
    except OSError as error:
        raise FailedError(f"no connection: {error.strerror or error}") from error
    return "accepts connections"
