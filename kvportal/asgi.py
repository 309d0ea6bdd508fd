"""`application`: HTTP, `/ws/ops/` and the lifespan protocol, for any ASGI server.

`manage.py serve` builds the runtime before its server starts. Any other server
(`uvicorn kvportal.asgi:application`) builds it through the lifespan protocol, from the environment
alone. There the portal does not know which address it is served on: without a token it answers the
internal API on loopback addresses only, unless KVPORTAL_ALLOW_ANONYMOUS_API is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "kvportal.settings")
DJANGO: Any = get_asgi_application()  # before anything that imports models

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import URLRouter  # noqa: E402
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402
from django.conf import settings  # noqa: E402
from django.db import Error  # noqa: E402
from django.urls import path, re_path  # noqa: E402

from kvportal.config import Config, load_config  # noqa: E402
from kvportal.config.values import is_loopback  # noqa: E402
from kvportal.consumers import OperationsConsumer  # noqa: E402
from kvportal.database import first_line  # noqa: E402
from kvportal.fastpath import FastPath, send_response  # noqa: E402
from kvportal.origin import SameOrigin, refuse  # noqa: E402
from kvportal.runtime import Runtime  # noqa: E402
from streams.http import API_PREFIX, ApiError, error_response  # noqa: E402

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

log = logging.getLogger(__name__)

_LOOPBACK_ONLY = ApiError(
    403,
    "token_required",
    "the internal API has no token and is therefore answered on loopback addresses only; set "
    "KVPORTAL_INTERNAL_API_TOKEN",
)


class Portal:
    """The ASGI application. `host` gives it the runtime whose settings hold for HTTP."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._http = FastPath(DJANGO, max_body_bytes=Config().max_body_bytes)
        self._websocket = AllowedHostsOriginValidator(
            SameOrigin(
                AuthMiddlewareStack(
                    URLRouter(
                        [path("ws/ops/", OperationsConsumer.as_asgi()), re_path("", cast("Any", refuse))]
                    )
                )
            )
        )
        self._loopback_only = False

    def host(self, runtime: Runtime) -> None:
        """Before the server starts."""
        self._runtime = runtime
        self._http = FastPath(DJANGO, max_body_bytes=runtime.config.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            if self._loopback_only and is_exposed(scope):
                await send_response(send, error_response(_LOOPBACK_ONLY), scope["method"])
            else:
                await self._http(scope, receive, send)
        elif kind == "websocket":
            await self._open_page(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            raise ValueError(f"the protocol {kind!r} is not spoken here")

    async def _open_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A page that is open needs no database; one that opens does, and tries again by itself."""
        try:
            await self._websocket(scope, receive, send)
        except Error as error:
            log.warning("a page is not let in, because nobody can tell whose it is: %s", first_line(error))
            await refuse(scope, receive, send)

    # ---- the lifespan protocol

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """One start and one stop, in the server's words."""
        own = self._runtime is None
        await receive()
        try:
            runtime = await self._start()
        except Exception as error:
            log.exception("the portal does not start")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        runtime.drain()
        runtime.detach()
        if own:
            await asyncio.to_thread(runtime.stop)
            self._runtime = None  # a server that starts again gets another
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> Runtime:
        runtime = self._runtime
        if runtime is None:
            config = load_config([], os.environ)
            runtime = Runtime(config, allowed_hosts=tuple(settings.ALLOWED_HOSTS))
            await asyncio.to_thread(runtime.start)
            self.host(runtime)
            self._loopback_only = not (config.internal_api_tokens or config.allow_anonymous_api)
        runtime.attach(asyncio.get_running_loop())
        return runtime


def is_exposed(scope: Scope) -> bool:
    """Whether a request for the internal API came in on an address that other machines reach."""
    host, port = scope.get("server") or ("", None)  # a Unix socket has no port
    path: str = scope["path"]
    below_root = path.removeprefix(scope.get("root_path") or "")  # what Django looks at
    internal = path.startswith(API_PREFIX) or below_root.startswith(API_PREFIX)
    return port is not None and internal and not is_loopback(host)


application = Portal()
