"""The portal of these tests behind Daphne: `python -m tests.http.daphne_portal`, prints its address."""

from __future__ import annotations

import os
import sys
from typing import Any

import daphne.server  # noqa: F401 - first: it installs the reactor
import django

from kvportal.server import Times
from kvportal.server.daphne_server import run_daphne
from kvportal.server.listening import listen, listening_url
from kvportal.server.stopping import StopRequest


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "kvportal.settings"
    django.setup()
    from django.core.asgi import get_asgi_application

    from kvportal.fastpath import FastPath
    from tests.http import shells

    inner: Any = get_asgi_application()
    with shells.portal(), StopRequest(10) as stop:
        listener = listen("127.0.0.1", 0)
        sys.stdout.write(f"kvportal serves {listening_url(listener)} \n")
        sys.stdout.flush()
        run_daphne(
            FastPath(inner, max_body_bytes=shells.MAX_BODY),
            listener,
            stop,
            Times(in_flight=0.2),
            max_body_bytes=shells.MAX_BODY,
            on_drain=lambda: None,
            attach=lambda loop: None,
            detach=lambda: None,
        )


if __name__ == "__main__":
    main()
