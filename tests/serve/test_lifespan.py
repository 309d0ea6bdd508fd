"""The application under another ASGI server, configured by the environment alone."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from kvportal import runtime
from kvportal.asgi import Portal as Application
from kvportal.asgi import is_exposed
from tests.serve.portal import Portal


def test_plain_uvicorn_serves_and_stops_it(data_dir):
    with Portal.uvicorn(data_dir, KVPORTAL_INTERNAL_API_TOKEN="t") as portal:
        portal.ready()
        streams = portal.url + "/v1/internal/streams"
        assert httpx.get(streams).status_code == 401
        assert httpx.get(streams, headers={"X-Internal-Token": "t"}).json() == {"streams": []}
        portal.signal(signal.SIGTERM)
        portal.ended()
        assert "Application shutdown complete" in portal.process.output()
        assert "Traceback" not in portal.process.output()


def test_plain_uvicorn_ends_when_the_configuration_is_faulty(data_dir):
    with Portal.uvicorn(data_dir, KVPORTAL_TARGET_TTFT="0") as portal:
        assert portal.ended() == 3
        assert "KVPORTAL_TARGET_TTFT: found '0'" in portal.process.output()


def test_plain_uvicorn_ends_when_the_database_is_not_migrated(tmp_path):
    with Portal.uvicorn(tmp_path / "var") as portal:
        assert portal.ended() == 3
        assert "run manage.py migrate --noinput" in portal.process.output()


class Lifespan:
    """Speaks the server's side of the lifespan protocol with an application."""

    def __init__(self, application: Application) -> None:
        self.to_application: asyncio.Queue[Any] = asyncio.Queue()
        self.from_application: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.create_task(
            application({"type": "lifespan"}, self.to_application.get, self.from_application.put)
        )

    async def say(self, kind: str) -> dict[str, Any]:
        await self.to_application.put({"type": f"lifespan.{kind}"})
        answer: dict[str, Any] = await asyncio.wait_for(self.from_application.get(), 30)
        return answer


async def request(
    application: Application, path: str, server: tuple[str, int | None] | None, *, root_path: str = ""
) -> int:
    """The status of a GET that came in on the address `server`."""
    sent: list[Any] = []
    said: asyncio.Queue[Any] = asyncio.Queue()
    said.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "server": server,
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": root_path,
    }
    await application(scope, said.get, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, 403), ({"KVPORTAL_ALLOW_ANONYMOUS_API": "1"}, 200), ({"KVPORTAL_INTERNAL_API_TOKEN": "t"}, 401)],
)
async def test_without_a_token_only_loopback_addresses_answer_the_internal_api(
    monkeypatch, variables, status
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    application = Application()
    lifespan = Lifespan(application)
    assert (await lifespan.say("startup"))["type"] == "lifespan.startup.complete"
    try:
        assert runtime.current() is not None
        assert await request(application, "/v1/internal/streams", ("10.0.0.7", 80)) == status
        assert await request(application, "/livez", ("10.0.0.7", 80)) == 200
        local = 401 if "KVPORTAL_INTERNAL_API_TOKEN" in variables else 200
        assert await request(application, "/v1/internal/streams", ("127.0.0.1", 80)) == local
        assert await request(application, "/v1/internal/streams", None) == local
    finally:
        assert (await lifespan.say("shutdown"))["type"] == "lifespan.shutdown.complete"
    await lifespan.task
    assert runtime.current() is None
    assert await request(application, "/v1/internal/streams", ("127.0.0.1", 80)) == 503


@pytest.mark.django_db(transaction=True)
async def test_a_server_that_starts_again_gets_a_portal_that_runs():
    application = Application()
    for _ in range(2):
        lifespan = Lifespan(application)
        assert (await lifespan.say("startup"))["type"] == "lifespan.startup.complete"
        assert await request(application, "/livez", ("127.0.0.1", 80)) == 200
        assert (await lifespan.say("shutdown"))["type"] == "lifespan.shutdown.complete"
        await lifespan.task
        assert await request(application, "/livez", ("127.0.0.1", 80)) == 503


@pytest.mark.parametrize(
    ("path", "root_path", "server", "exposed"),
    [
        ("/v1/internal/streams", "", ("10.0.0.7", 80), True),
        ("/v1/internal/streams", "", ("::1", 80), False),
        ("/v1/internal/streams", "", ("/run/portal.sock", None), False),
        ("/admin/", "", ("10.0.0.7", 80), False),
        ("/portal/v1/internal/streams", "/portal", ("10.0.0.7", 80), True),
        ("/portal/v1/internal/streams", "", ("10.0.0.7", 80), False),
        ("/v1/internal/streams", "/v1", ("10.0.0.7", 80), True),
        ("/portal/admin/", "/portal", ("10.0.0.7", 80), False),
    ],
)
def test_what_counts_as_exposed(path, root_path, server, exposed):
    assert is_exposed({"path": path, "root_path": root_path, "server": server}) is exposed


@pytest.mark.django_db(transaction=True)
async def test_a_root_path_opens_nothing_to_other_machines():
    application = Application()
    lifespan = Lifespan(application)
    await lifespan.say("startup")
    try:
        below = "/portal/v1/internal/streams"
        assert await request(application, below, ("10.0.0.7", 80), root_path="/portal") == 403
        assert await request(application, below, ("127.0.0.1", 80), root_path="/portal") == 200
    finally:
        await lifespan.say("shutdown")
    await lifespan.task
