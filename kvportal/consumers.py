"""`/ws/ops/`: the live state for signed-in staff.

The server sends states (`{"type": "state", "version": n, ...}`): a full one with chart series first,
then at most one a second when something changed. A client that sends `{"type": "ack", "version": n}` gets
the next state only after it has acknowledged the last one, and then the newest: the portal's page does
so once it has shown a state. `{"type": "full"}` asks for everything again. A client that does not read
is dropped by the server when it leaves a ping unanswered (`kvportal.server.Times`). Whoever may not watch
is turned away before the connection is accepted; a session that ends, or loses its permission, is cut
within a minute.
"""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import import_module
from typing import Any

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth import get_user
from django.db import Error
from django.http import HttpRequest

from kvportal import live
from kvportal.live import Subscriber

log = logging.getLogger(__name__)

VIEW_PERMISSION = "streams.view_stream"
RECHECK_SECONDS = 60.0
MAX_MESSAGE_CHARS = 1024
CLOSE_NOT_ALLOWED = 4403
CLOSE_NOT_SERVING = 4503
"""The portal's parts are not running in this process."""


def may_watch(user: Any) -> bool:
    """Whether a user may see the live state: active staff with the permission to view streams."""
    return bool(user and user.is_active and user.is_staff and user.has_perm(VIEW_PERMISSION))


def still_may_watch(scope: dict[str, Any]) -> bool:
    """The same question again, asked of the database as a request would: a session that has expired, or
    was signed in with a password that is none any more, belongs to nobody."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(scope["session"].session_key)
    return may_watch(get_user(request))


class Client(Subscriber):
    """One connection. States are pushed to it until it acknowledges one; from then on it sets the pace."""

    _paces = False

    def acknowledge(self, version: object) -> None:
        self._paces = True
        super().acknowledge(version)

    async def _deliver(self, text: str) -> None:
        await super()._deliver(text)
        if not self._paces:
            super().acknowledge(self._in_flight)


class OperationsConsumer(AsyncWebsocketConsumer):
    """One open page, or another client of a person's session."""

    channel_layer_alias = "none"
    """Nothing comes to a page over a channel layer, and one that is down must not take the page with it."""
    recheck_seconds = RECHECK_SECONDS
    _live: live.Live | None = None
    _subscriber: Client | None = None
    _recheck: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()  # also after a mistake of ours, or when the server gives the connection up

    async def connect(self) -> None:
        if not await database_sync_to_async(may_watch)(self.scope.get("user")):
            await self.close()
            return
        await self.accept()
        self._live = live.current()
        if self._live is None:
            await self.close(CLOSE_NOT_SERVING)
            return
        self._subscriber = Client(self._send_text)
        self._live.subscribe(self._subscriber)
        await self._offer_full()
        self._recheck = asyncio.create_task(self._keep_checking())

    def _leave(self) -> None:
        if self._recheck is not None:
            self._recheck.cancel()
        if self._live is not None and self._subscriber is not None:
            self._live.unsubscribe(self._subscriber)
            self._subscriber.close()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        message = _parse(text_data)
        if self._subscriber is None or message is None:
            return
        if message.get("type") == "ack":
            self._subscriber.acknowledge(message.get("version"))
        elif message.get("type") == "full":
            await self._offer_full()

    async def _offer_full(self) -> None:
        if self._live is not None and self._subscriber is not None:
            self._subscriber.offer_full(*await asyncio.to_thread(self._live.full))

    async def _send_text(self, text: str) -> None:
        await self.send(text_data=text)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self.recheck_seconds)
            try:
                allowed = await database_sync_to_async(still_may_watch)(self.scope)
            except Error as error:
                # Whoever watches needs the page most while something is broken.
                log.info("could not check whether a page may still watch: %s", error)
                continue
            if not allowed:
                await self.close(CLOSE_NOT_ALLOWED)
                return


def _parse(text: str | None) -> dict[str, Any] | None:
    """A message of the page; None for anything else, which is ignored."""
    if text is None or len(text) > MAX_MESSAGE_CHARS:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
