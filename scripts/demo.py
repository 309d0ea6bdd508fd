"""The demo: the portal and three simulated engines on this machine, started and ended together.

    .venv/bin/python -m scripts.demo [--port 8888]

Keeps its database, its login and the engines' output in var/demo (or KVPORTAL_DATA_DIR), apart from a real
installation; every other KVPORTAL_ variable, and those for etcd, are ignored. Exit status 0 after Ctrl-C or
SIGTERM, 1 when the portal ended by itself, 2 when the port cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from kvportal.config.values import integer
from scripts.supervisor import Supervisor

CHECKOUT = Path(__file__).resolve().parents[1]
MANAGE = (sys.executable, str(CHECKOUT / "manage.py"))
HOST = "127.0.0.1"
USERNAME = "admin"
TOPIC = "xllm-kv"
ENGINES = 3
POLL_SECONDS = 0.1
PORTAL = "the portal"
PORT_KIND = integer(1, 65535)
EVENTS = {"discovery": {"enabled": True, "topic": TOPIC}}


class PortError(Exception):
    """The demo cannot use this port; the sentence says why."""


def engine_command(number: int, url: str) -> list[str]:
    """A simulated engine that registers itself with the portal, from which everything else follows."""
    registration = ["--register", "http", "--portal", url]
    return [*MANAGE, "simulate_engine", "--topic", TOPIC, "--seed", str(number), *registration]


def say(text: str) -> None:
    print(text, flush=True)


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as answer:  # noqa: S310 - our own loopback address
            return bool(answer.status == 200)
    except OSError:
        return False


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def prepare_environment() -> Path:
    """Set the variables that the demo's processes see; the data directory."""
    data_dir = Path(os.environ.get("KVPORTAL_DATA_DIR") or CHECKOUT / "var" / "demo").absolute()
    for name in [name for name in os.environ if name.startswith(("KVPORTAL_", "ETCD_"))]:
        del os.environ[name]
    os.environ["KVPORTAL_DATA_DIR"] = str(data_dir)
    os.environ["DJANGO_SETTINGS_MODULE"] = "kvportal.settings"
    return data_dir


def prepare_database(data_dir: Path) -> str:
    """Bring the database up to date and make sure of a login; its password.

    The password is random, and the same at every start until somebody changes it.
    """
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", interactive=False, verbosity=0)

    from django.contrib.auth.models import User

    password_file = data_dir / "admin-password"
    user, _ = User.objects.get_or_create(username=USERNAME)
    password = password_file.read_text().strip() if password_file.exists() else ""
    if not (password and user.check_password(password)):
        password = secrets.token_urlsafe(12)
        write_private(password_file, password + "\n")
        user.set_password(password)
    user.is_active = user.is_staff = user.is_superuser = True
    user.save()
    return password


def welcome_text(url: str, password: str, data_dir: Path) -> str:
    return f"""
The portal is up. {ENGINES} simulated engines register with it and publish KV events over TCP,
and a stand-in for a gateway asks it where to send requests.

    operations page   {url}/admin/
    user              {USERNAME}
    password          {password}

    the streams       curl {url}/v1/internal/streams
    the engines       curl {url}/v1/internal/instances
    their output      {data_dir}/engine-*.log

Ctrl-C ends the demo with all its processes.
"""


def watch(supervisor: Supervisor, url: str, welcome: str) -> int:
    """Wait until a stop is asked for or the portal ends; the exit status. Says `welcome` once `url` answers.

    An engine that ends, by itself or by whoever wants to see what the portal makes of it, is only named.
    """
    announced = False
    while not supervisor.stops_asked:
        for dead in supervisor.newly_dead():
            say(f"demo: {dead.describe_end()}")
            if dead.name == PORTAL:
                say("demo: ending the rest")
                return 1
        if not announced and answers(f"{url}/livez"):
            say(welcome)
            announced = True
        time.sleep(POLL_SECONDS)
    return 0


def run(supervisor: Supervisor, port: int) -> int:
    """Prepare everything, start everything, watch it; the exit status."""
    url = f"http://{HOST}:{port}"
    say("demo: preparing the database ...")
    data_dir = prepare_environment()
    password = prepare_database(data_dir)
    events_file = data_dir / "kv-events.json"
    write_private(events_file, json.dumps(EVENTS, indent=2))

    say(f"demo: starting {ENGINES} engines and the portal ...")
    for number in range(1, ENGINES + 1):
        name = f"engine-{number}"
        supervisor.spawn(name, engine_command(number, url), cwd=CHECKOUT, log=data_dir / f"{name}.log")
    serve = [*MANAGE, "serve", "--server-host", HOST, "--http-server-port", str(port)]
    serve += ["--load-balance-policy", "CAR", "--kv-events-config-file", str(events_file)]
    supervisor.spawn(PORTAL, serve, cwd=CHECKOUT)
    gateway = [sys.executable, "-m", "scripts.demo_gateway", url]
    supervisor.spawn("the gateway", gateway, cwd=CHECKOUT, log=data_dir / "gateway.log")
    return watch(supervisor, url, welcome_text(url, password, data_dir))


def usable_port(text: str) -> int:
    """The port that `text` names. Raises PortError with a sentence when the portal cannot listen on it."""
    try:
        port = PORT_KIND.parse(text)
    except ValueError:
        raise PortError(f"PORT: found {text!r}; allowed: {PORT_KIND.allowed}") from None
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise PortError(f"PORT: found {port} ({reason}); allowed: one that is free on {HOST}") from None
    return port


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The portal with three simulated engines on this machine.")
    parser.add_argument("--port", default="8888", help="port of the portal on 127.0.0.1")
    parser.add_argument("--check", action="store_true", help="only say whether the port can be used")
    options = parser.parse_args(arguments)
    try:
        port = usable_port(options.port)
    except PortError as error:
        say(f"demo: {error}")
        return 2
    if options.check:
        return 0

    supervisor = Supervisor()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, supervisor.ask_to_stop)
    try:
        return run(supervisor, port)
    finally:
        supervisor.stop()
        say("demo: all processes have ended")


if __name__ == "__main__":
    sys.exit(main())
