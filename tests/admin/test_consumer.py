from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db import OperationalError
from django.utils import timezone

from kvportal import consumers, live
from kvportal.consumers import (
    CLOSE_NOT_ALLOWED,
    CLOSE_NOT_SERVING,
    MAX_MESSAGE_CHARS,
    OperationsConsumer,
)
from kvportal.live import Live
from tests.admin.test_live import FakeSource
from tests.admin.values import lost, status

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(status())


@pytest.fixture
def portal(source: FakeSource) -> Iterator[Live]:
    own = Live(source, "here")
    live.install(own)
    yield own
    live.install(None)


@database_sync_to_async
def person(*, staff: bool = True, may_view: bool = True, active: bool = True) -> User:
    user = User.objects.create(username="pat", is_staff=staff, is_active=active)
    if may_view:
        user.user_permissions.add(Permission.objects.get(codename="view_stream"))
    return user


@database_sync_to_async
def session(user: Any) -> SessionStore:
    """One that the user has signed in with."""
    store = SessionStore()
    if user.is_authenticated:
        store[SESSION_KEY] = str(user.pk)
        store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
        store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.create()
    return store


class Browser(WebsocketCommunicator):
    """The library's, with the patience that a busy machine needs."""

    async def connect(self, timeout: float = 30) -> tuple[bool, int | None]:
        return await super().connect(timeout)

    async def receive_output(self, timeout: float = 30) -> Any:
        return await super().receive_output(timeout)

    async def receive_from(self, timeout: float = 30) -> Any:
        return await super().receive_from(timeout)

    async def disconnect(self, code: int = 1000, timeout: float = 30) -> None:
        await super().disconnect(code, timeout)


async def connect(user: Any) -> tuple[Browser, bool, int | None]:
    browser = Browser(OperationsConsumer.as_asgi(), "/ws/ops/")
    browser.scope |= {"user": user, "session": await session(user)}
    accepted, code = await browser.connect()
    return browser, accepted, code


async def test_staff_with_the_permission_gets_the_full_state(portal: Live) -> None:
    page, accepted, _ = await connect(await person())
    assert accepted
    state = json.loads(await page.receive_from())
    assert state["type"] == "state"
    assert state["streams"][0]["state"] == "synchronized"
    assert "series" in state
    await page.disconnect()
    assert not portal._subscribers


@pytest.mark.parametrize("lacks", [{"staff": False}, {"may_view": False}, {"active": False}])
async def test_everybody_else_is_turned_away_before_accepting(portal: Live, lacks: dict[str, bool]) -> None:
    _, accepted, _ = await connect(await person(**lacks))
    assert not accepted


async def test_anonymous_is_turned_away(portal: Live) -> None:
    _, accepted, _ = await connect(AnonymousUser())
    assert not accepted


async def test_client_that_only_reads_gets_every_change(portal: Live, source: FakeSource) -> None:
    client, _, _ = await connect(await person())
    versions = [json.loads(await client.receive_from())["version"]]
    for statuses in ((lost(),), (status(),), (lost(),)):
        source.now_statuses = statuses
        portal.sample()
        state = json.loads(await client.receive_from())
        assert state["streams"][0]["state"] == statuses[0].state
        versions.append(state["version"])
    assert versions == sorted(set(versions))
    await client.disconnect()


async def test_client_that_acknowledges_gets_the_next_state_only_then(
    portal: Live, source: FakeSource
) -> None:
    page, _, _ = await connect(await person())
    await page.receive_from()
    await page.send_to(json.dumps({"type": "ack", "version": 0}))
    await page.send_to(json.dumps({"type": "full"}))
    shown = json.loads(await page.receive_from())
    for statuses in ((lost(),), (status(),), (lost(),)):
        source.now_statuses = statuses
        portal.sample()
    assert await page.receive_nothing()
    await page.send_to(json.dumps({"type": "ack", "version": shown["version"]}))
    assert json.loads(await page.receive_from())["streams"][0]["state"] == "unsynchronized"
    assert await page.receive_nothing()
    await page.disconnect()


async def test_page_may_ask_for_everything_again(portal: Live) -> None:
    page, _, _ = await connect(await person())
    first = json.loads(await page.receive_from())
    await page.send_to(json.dumps({"type": "ack", "version": first["version"]}))
    await page.send_to(json.dumps({"type": "full"}))
    assert "series" in json.loads(await page.receive_from())
    await page.disconnect()


@pytest.mark.parametrize(
    "nonsense", [" ", "{", "[]", "null", '{"type": 7}', '"x"', "x" * 100_000, "[" * MAX_MESSAGE_CHARS]
)
async def test_nonsense_from_a_page_is_ignored(portal: Live, nonsense: str) -> None:
    page, _, _ = await connect(await person())
    first = json.loads(await page.receive_from())
    await page.send_to(nonsense)
    await page.send_to(json.dumps({"type": "ack", "version": first["version"]}))
    await page.send_to(json.dumps({"type": "full"}))
    assert "series" in json.loads(await page.receive_from())
    await page.disconnect()


async def test_page_whose_state_cannot_be_built_is_not_remembered(
    portal: Live, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "extras", lambda: 1 / 0)
    page, accepted, _ = await connect(await person())
    assert accepted
    with pytest.raises(ZeroDivisionError):
        await page.wait(timeout=30)
    assert not portal._subscribers


async def test_process_that_serves_no_portal_says_so() -> None:
    page, accepted, _ = await connect(await person())
    assert accepted
    assert (await page.receive_output())["code"] == CLOSE_NOT_SERVING


@database_sync_to_async
def take_away(user: User, what: str, store: SessionStore) -> None:
    if what == "session":
        store.flush()
    elif what == "time":
        Session.objects.update(expire_date=timezone.now())
    elif what == "password":
        user.set_password("another")
        user.save()
    elif what == "permission":
        user.user_permissions.clear()
    else:
        User.objects.filter(pk=user.pk).update(**{what: False})


@pytest.mark.parametrize("what", ["session", "time", "password", "permission", "is_staff", "is_active"])
async def test_page_is_cut_when_its_user_may_not_watch_any_more(
    portal: Live, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OperationsConsumer, "recheck_seconds", 0.02)
    user = await person()
    page, _, _ = await connect(user)
    await page.receive_from()
    await take_away(user, what, page.scope["session"])
    assert (await page.receive_output())["code"] == CLOSE_NOT_ALLOWED
    await page.disconnect()


async def test_page_stays_open_while_its_user_may_watch(
    portal: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], consumers.still_may_watch
    monkeypatch.setattr(consumers, "still_may_watch", lambda scope: asked.append(ask(scope)) or asked[-1])
    monkeypatch.setattr(OperationsConsumer, "recheck_seconds", 0.01)
    page, _, _ = await connect(await person())
    first = json.loads(await page.receive_from())
    while len(asked) < 3:
        assert await page.receive_nothing(timeout=0.02)
    assert set(asked) == {True}
    await page.send_to(json.dumps({"type": "ack", "version": first["version"]}))
    await page.send_to(json.dumps({"type": "full"}))
    assert "series" in json.loads(await page.receive_from())
    await page.disconnect()


async def test_page_stays_open_while_the_database_is_away(
    portal: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fail(scope: Any) -> bool:
        asked.append(scope)
        raise OperationalError("no route")

    monkeypatch.setattr(consumers, "still_may_watch", fail)
    monkeypatch.setattr(OperationsConsumer, "recheck_seconds", 0.01)
    page, _, _ = await connect(await person())
    first = json.loads(await page.receive_from())
    while len(asked) < 3:
        assert await page.receive_nothing(timeout=0.02)
    await page.send_to(json.dumps({"type": "ack", "version": first["version"]}))
    await page.send_to(json.dumps({"type": "full"}))
    assert "series" in json.loads(await page.receive_from())
    await page.disconnect()
