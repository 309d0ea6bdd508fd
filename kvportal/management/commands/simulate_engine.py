"""`manage.py simulate_engine`: one simulated xLLM engine that speaks the real protocol over TCP.

Exit status: 0 after SIGTERM or Ctrl-C, 1 when a port is taken, 2 for a wrong flag.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from kvportal.simulated_engine.flags import (
    FlagError,
    add_flags,
    check_together,
    identity_of,
    open_server,
    registrar_of,
)
from kvportal.simulated_engine.registration import RegistrationKeeper
from streams.simulator.server import EngineServer


class Command(BaseCommand):
    help = (
        "Runs one simulated xLLM engine: KV events and snapshots over ZeroMQ, /health and faults on demand "
        "over HTTP, registration and heartbeats."
    )
    requires_system_checks: tuple[str, ...] = ()
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        self._parser = parser
        parser.usage = "manage.py simulate_engine [flags]"
        add_flags(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        stop = _stop_on_signals()
        check_together(options, self._parser.error)
        try:
            server = open_server(options)
        except OSError as error:
            raise CommandError(str(error)) from error
        with server:
            self._run(server, options, stop)
        self._say("stopped")

    def _run(self, server: EngineServer, options: dict[str, Any], stop: threading.Event) -> None:
        identity = identity_of(options, server)
        self._name = identity.name
        try:
            registrar = registrar_of(options, identity)
        except FlagError as error:
            raise CommandError(str(error), returncode=2) from error
        keeper = None
        if registrar is not None:
            interval = options["heartbeat_interval"]
            keeper = RegistrationKeeper(server, registrar, identity, interval_s=interval, say=self._say)
        self._introduce(server)
        if keeper:
            keeper.start()
        server.engine.start(options["rate"])
        while not stop.wait(options["status_interval"] or None):
            self._say(_status(server, keeper))
        if keeper:
            server.health = "error"  # a portal that probes us now must not think that we stay
            keeper.stop()

    def _introduce(self, server: EngineServer) -> None:
        for rank in server.engine.ranks:
            publisher = rank.publisher
            where = f"events {publisher.endpoint}, snapshots {publisher.replay_endpoint}"
            self._say(f"rank {rank.dp_rank}: {where}, topic {server.engine.config.topic!r}")
        self._say(f"health {server.url}/health, faults on demand {server.url}/faults")

    def _say(self, text: str) -> None:
        self.stdout.write(f"{self._name}: {text}")
        self.stdout.flush()


def _status(server: EngineServer, keeper: RegistrationKeeper | None) -> str:
    ranks = [rank.state() for rank in server.engine.ranks]
    device, host = (sum(rank[name] for rank in ranks) for name in ("device_blocks", "host_blocks"))
    parts = [
        f"{device:,} device and {host:,} host blocks",
        "next sequence " + ", ".join(str(rank["next_sequence"]) for rank in ranks),
        f"{sum(rank['subscribers'] for rank in ranks)} subscribers",
        f"{server.engine.rate:g} events/s",
    ]
    return "; ".join([*parts, keeper.status] if keeper else parts)


def _stop_on_signals() -> threading.Event:
    """Set by SIGTERM or Ctrl-C; a second one ends the process without tidying up."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, handle)
    return stop
