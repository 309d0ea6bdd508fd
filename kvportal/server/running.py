"""One run of the portal: socket, runtime and server in order, and the same backwards."""

from __future__ import annotations

import contextlib

from django.conf import settings

from kvportal.config.model import Config
from kvportal.database import UnusableDatabaseError
from kvportal.process import ProcessError
from kvportal.server import STOP_SECONDS, Output, Times
from kvportal.server.listening import ListenError, listen, listening_url
from kvportal.server.stopping import StopRequest
from kvportal.server.uvicorn_server import UvicornMissingError, require_uvicorn, run_uvicorn


class ServeError(Exception):
    """The portal cannot serve; the sentence says why and what to do."""


def serve(config: Config, output: Output) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises ServeError with a sentence when it cannot start."""
    times = Times(drain=config.drain_seconds)
    with StopRequest(STOP_SECONDS + times.drain) as stop:
        # These take a while, in which a signal has its meaning already.
        from kvportal.asgi import application
        from kvportal.runtime import Runtime
        from kvportal.server.daphne_server import run_daphne

        try:
            if config.server == "uvicorn":
                require_uvicorn()
            listener = listen(config.server_host, config.http_server_port)
        except (ListenError, UvicornMissingError) as error:
            raise ServeError(str(error)) from error
        with contextlib.closing(listener):
            runtime = Runtime(config, allowed_hosts=tuple(settings.ALLOWED_HOSTS))
            try:
                runtime.start()
            except (ProcessError, UnusableDatabaseError) as error:
                raise ServeError(str(error)) from error
            try:
                application.host(runtime)
                if not stop.requested:
                    output.write(
                        f"kvportal serves {listening_url(listener)} ({config.server}); Ctrl-C stops it"
                    )
                    output.flush()
                if config.server == "uvicorn":
                    run_uvicorn(application, listener, stop, times, on_drain=runtime.drain)
                else:
                    run_daphne(
                        application,
                        listener,
                        stop,
                        times,
                        max_body_bytes=config.max_body_bytes,
                        on_drain=runtime.drain,
                        attach=runtime.attach,
                        detach=runtime.detach,
                    )
            finally:
                runtime.stop()
        if not stop.requested:
            raise ServeError("the server ended by itself; its log says why")
