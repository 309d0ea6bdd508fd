"""Flags of `simulate_engine`, and what they build: an engine on its ports, its identity, its registrar."""

from __future__ import annotations

import argparse
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

from kvportal.config.endpoints import endpoint_key
from kvportal.config.flags import BY_NAME
from kvportal.config.load import token_lines
from kvportal.config.values import Kind, choice, integer, is_host, number, spelled, text_of
from kvportal.simulated_engine.registration import (
    TIMEOUT_S,
    EtcdRegistrar,
    Identity,
    PortalRegistrar,
    Registrar,
)
from routing.instances.etcd import EtcdSettings
from routing.instances.model import Role
from routing.instances.registration import check_name
from streams.simulator import CacheConfig, EngineConfig, SimulatedEngine, TrafficConfig
from streams.simulator.messages import HashForm
from streams.simulator.publisher import Watermark
from streams.simulator.server import EngineServer

T = TypeVar("T")

DEFAULT_PORTAL = "http://127.0.0.1:8888"
_SHARE = number(0, 1)
_PORT = integer(0, 65535)
_OFFSET = integer(1, 65534)


def _host(text: str) -> str:
    host = text.removeprefix("[").removesuffix("]")
    if not is_host(host):
        raise ValueError
    return host


def _portal(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
        raise ValueError
    _ = url.port
    return f"{url.scheme}://{url.netloc}"


def _role(text: str) -> Role:
    return Role(text.upper())


NAME = Kind("1 to 256 characters without spaces and slashes", check_name)
HOST = Kind("an IP address or a host name", _host)
ENDPOINT = Kind("tcp://host:port, rank 0's; rank r uses the r-th port after it", endpoint_key)
PORTAL = Kind("http://host:port", _portal)
ROLE = Kind(", ".join(role.lower() for role in Role), _role)


class FlagError(Exception):
    """A flag that cannot be used; the message names it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags, in groups."""
    _add_addresses(parser.add_argument_group("where it listens"))
    _add_cache(parser.add_argument_group("what it holds and publishes"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_registration(parser.add_argument_group("registration"))


def check_together(options: dict[str, Any], fault: Callable[[str], object]) -> None:
    """What no flag can tell alone. `fault` is given a sentence and does not return."""
    if (options["endpoint"] is None) != (options["replay_endpoint"] is None):
        fault("--endpoint and --replay-endpoint: give both or neither")
    if options["endpoint"] and options["endpoint"][0] != options["replay_endpoint"][0]:
        fault("--endpoint and --replay-endpoint: must name the same host")
    if options["ttl"] <= options["heartbeat_interval"]:
        fault("--ttl: must be longer than --heartbeat-interval")
    if options["endpoint"] is None and options["event_port_offset"] == options["replay_port_offset"]:
        fault("--replay-port-offset: must differ from --event-port-offset")
    highest = max(options["event_port_offset"], options["replay_port_offset"]) + options["dp_size"] - 1
    room = 65535 - highest
    if options["endpoint"] is None and options["port"] > room:
        fault(f"--port: with these offsets and --dp-size, at most {room} is allowed")
    if options["endpoint"] is None and not options["port"] and room < 2048:
        fault("--port: with these offsets and --dp-size, one must be named; it cannot be chosen")


def open_server(options: dict[str, Any]) -> EngineServer:
    """The engine on its ports, without traffic yet. `OSError`: a port is taken, or no such address."""
    bind = _literal(options["bind"] or options["host"])
    config = _engine_config(options, bind)
    seed = options["seed"]
    if seed is None:
        seed = zlib.crc32(f"{options['name']}|{options['host']}:{options['port']}".encode())
    if options["endpoint"] is None:
        offsets = {name: options[name] for name in ("event_port_offset", "replay_port_offset")}
        return EngineServer.open(host=bind, port=options["port"], seed=seed, config=config, **offsets)
    engine = SimulatedEngine(seed=seed, config=config)
    try:
        return EngineServer(engine, host=bind, port=options["port"])
    except BaseException:
        engine.close()
        raise


def _engine_config(options: dict[str, Any], bind: str) -> EngineConfig:
    event_host, event_port = options["endpoint"] or (bind, 0)
    _, replay_port = options["replay_endpoint"] or (bind, 0)

    def chosen(*field_names: str) -> dict[str, Any]:
        return {name: options[name] for name in field_names}

    return EngineConfig(
        host=_literal(event_host),
        event_port=event_port,
        replay_port=replay_port,
        cache=CacheConfig(
            **chosen(
                "block_size", "device_blocks", "host_blocks", "offload_delay", "orphan_probability",
                "blocks_per_event", "hash_form", "vllm_fields",
            )
        ),
        traffic=TrafficConfig(**chosen("corpus_seed", "lora_share", "image_share")),
        **chosen("dp_size", "topic", "first_sequence", "watermark", "snapshot_parts"),
    )  # fmt: skip


def _literal(host: str) -> str:
    """An address to bind: ZeroMQ does not resolve names there."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}: {error.strerror}") from error
    # IPv4 first: that is what peers try when they are given a name.
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def identity_of(options: dict[str, Any], server: EngineServer) -> Identity:
    """What it registers as."""
    host = options["host"]
    address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
    return Identity(options["name"] or address, options["role"], options["dp_size"], host)


def registrar_of(options: dict[str, Any], identity: Identity) -> Registrar | None:
    """How it registers; None: not at all. `FlagError`: a file with a secret cannot be used."""
    if options["register"] == "none":
        return None
    url = options["portal"] or (DEFAULT_PORTAL if options["register"] == "http" else None)
    portal = PortalRegistrar(url, identity.name, options["ttl"], _portal_token(options)) if url else None
    if options["register"] == "http":
        return portal
    try:
        return EtcdRegistrar(_etcd_settings(options), identity, options["ttl"], portal)
    except OSError as error:
        raise FlagError(f"KVPORTAL_ETCD_CA, KVPORTAL_ETCD_CERT, KVPORTAL_ETCD_KEY: {error}") from error


def _portal_token(options: dict[str, Any]) -> str:
    path = options["portal_token_file"]
    if path is None:
        return os.environ.get("KVPORTAL_INTERNAL_API_TOKEN", "")
    try:
        tokens = token_lines(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise FlagError(f"--portal-token-file: cannot read {path}: {error}") from error
    if not tokens:
        raise FlagError(f"--portal-token-file: {path} is empty")
    return tokens[0][1]


def _etcd_settings(options: dict[str, Any]) -> EtcdSettings:
    environ = os.environ
    return EtcdSettings(
        endpoints=options["etcd_addr"],
        namespace=options["etcd_namespace"],
        username=environ.get("ETCD_USERNAME", ""),
        password=environ.get("ETCD_PASSWORD", ""),
        ca=environ.get("KVPORTAL_ETCD_CA", ""),
        cert=environ.get("KVPORTAL_ETCD_CERT", ""),
        key=environ.get("KVPORTAL_ETCD_KEY", ""),
        request_timeout=TIMEOUT_S,
    )


def _typed(kind: Kind[T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            return kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {kind.allowed}") from None

    return parse


def _flag(group: Any, name: str, kind: Kind[Any], default: Any, help_text: str) -> None:
    text = f"{help_text} ({kind.allowed}; default: {spelled(default) or 'none'})"
    group.add_argument(
        name, type=_typed(kind), default=default, metavar="VALUE", help=text.replace("%", "%%")
    )


def _add_addresses(group: Any) -> None:
    _flag(group, "--name", NAME, None, "name of the instance; left out: host:port")
    _flag(group, "--host", HOST, "127.0.0.1", "address under which others reach it")
    _flag(group, "--bind", HOST, None, "address to listen on; left out: --host")
    _flag(group, "--port", _PORT, 0, "HTTP port; 0: one is chosen")
    _flag(group, "--event-port-offset", _OFFSET, 10_000, "events are published on --port plus this")
    _flag(group, "--replay-port-offset", _OFFSET, 30_000, "snapshots are served on --port plus this")
    _flag(group, "--endpoint", ENDPOINT, None, "where events are published, instead of the offset")
    _flag(group, "--replay-endpoint", ENDPOINT, None, "where snapshots are served, instead of the offset")


def _add_cache(group: Any) -> None:
    _flag(group, "--dp-size", integer(1, 1024), 1, "data-parallel ranks")
    _flag(group, "--block-size", integer(1, 65_536), 128, "tokens per block")
    _flag(group, "--topic", text_of(), "xllm-kv", "topic of live messages")
    _flag(group, "--device-blocks", integer(1, 10_000_000), 2048, "device capacity of each rank, in blocks")
    _flag(group, "--host-blocks", integer(0, 10_000_000), 4096, "host capacity, in blocks; 0: no offloading")
    _flag(group, "--offload-delay", integer(0, 100_000), 3, "messages until a host copy is announced")
    _flag(group, "--orphan-probability", _SHARE, 0.01, "chance that an eviction leaves children behind")
    _flag(group, "--blocks-per-event", integer(1, 65_536), 16, "most blocks in one BlockStored")
    _flag(group, "--hash-form", choice(*get_args(HashForm)), "unsigned", "how block hashes are written")
    _flag(group, "--first-sequence", integer(0, 2**64 - 2), 0, "sequence of the first message")
    _flag(group, "--watermark", choice(*get_args(Watermark)), "last", "sequence that snapshots report")
    _flag(group, "--snapshot-parts", integer(1, 10_000), 1, "frame sets in a snapshot reply")
    group.add_argument("--vllm-fields", action="store_true", help="write the further fields that vLLM writes")


def _add_traffic(group: Any) -> None:
    _flag(group, "--rate", number(0, 1_000_000), 50.0, "events per second over all ranks; 0: none")
    _flag(group, "--seed", integer(0, 2**63), None, "order of the traffic; left out: from the name")
    _flag(group, "--corpus-seed", integer(0, 2**63), 1, "content: engines with the same one share prefixes")
    _flag(group, "--lora-share", _SHARE, 0.05, "conversations with a LoRA adapter")
    _flag(group, "--image-share", _SHARE, 0.05, "conversations with an image")
    _flag(group, "--status-interval", number(0, 86_400), 10.0, "seconds between two status lines; 0: none")


def _add_registration(group: Any) -> None:
    _flag(group, "--register", choice("none", "etcd", "http"), "none", "where to register")
    _flag(group, "--role", ROLE, "default", "role to register with")
    _flag(group, "--ttl", integer(1, 86_400), 5, "seconds that the registration outlives the heartbeats")
    _flag(group, "--heartbeat-interval", number(0.05, 3600), 1.0, "seconds between two heartbeats")
    portal = (
        f"takes heartbeats, with --register http also the registration; then {DEFAULT_PORTAL} if left out"
    )
    _flag(group, "--portal", PORTAL, None, portal)
    source = "file of the portal's tokens, of which the first is used; or set KVPORTAL_INTERNAL_API_TOKEN"
    _flag(group, "--portal-token-file", text_of("a readable file"), None, source)
    for option in (BY_NAME["etcd_addr"], BY_NAME["etcd_namespace"]):
        _flag(group, option.spelling, option.kind, option.default, option.help)
