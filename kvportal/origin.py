"""WebSockets are for pages of this portal only: any other page's connection is refused.

A browser sends the portal's cookies with a WebSocket that a foreign page opens, and no CSRF token
protects it. What tells them apart is the header Origin, which pages cannot forge.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

Scope = MutableMapping[str, Any]
Application = Callable[
    [Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]


class SameOrigin:
    """Lets a WebSocket through whose Origin is this host, or one of CSRF_TRUSTED_ORIGINS."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(
        self, scope: Scope, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
    ) -> None:
        headers = dict(scope["headers"])
        origin, host = (headers.get(key, b"").decode("latin-1") for key in (b"origin", b"host"))
        if is_own_origin(origin, host, settings.CSRF_TRUSTED_ORIGINS):
            await self._application(scope, receive, send)
        else:
            await refuse(scope, receive, send)


def is_own_origin(origin: str, host: str, trusted: list[str]) -> bool:
    """Whether a page from `origin` belongs to the server that was asked for as `host`.

    The scheme is left out: behind a proxy that ends TLS it is another one than the browser's.
    """
    try:
        place = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    return bool(place) and (place == host.lower() or origin.lower() in (name.lower() for name in trusted))


async def refuse(
    scope: Scope, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
) -> None:
    """Refuses a WebSocket before it is accepted (the browser sees 403)."""
    await send({"type": "websocket.close", "code": 4403})
