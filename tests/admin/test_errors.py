"""What browsers get where there is no page: themed, and never in place of JSON."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import InterfaceError, OperationalError
from django.db.backends.utils import CursorWrapper
from django.http import HttpResponseServerError
from django.test import Client, RequestFactory
from django.views.defaults import bad_request, server_error

from kvportal.logs import NoTracebackOfRefusals
from kvportal.urls import LOGO
from tests.admin.test_pages import signed_in


def assert_themed(answer: Any, status: int, words: str) -> None:
    page = answer.content.decode()
    assert answer.status_code == status
    assert answer.headers["Content-Type"].startswith("text/html")
    assert words in page
    assert "kvportal/kvportal.css" in page
    assert "dark_mode.css" in page
    assert 'href="/admin/"' in page


def test_unknown_page_is_themed_and_asks_no_database() -> None:
    # Without a mark for it, asking the database would fail.
    assert_themed(Client().get("/nothing/here/"), 404, "There is no such page")


@pytest.mark.django_db
def test_pages_in_the_admin_fail_in_the_same_clothes() -> None:
    assert_themed(signed_in(superuser=True).get("/admin/nothing/"), 404, "There is no such page")
    assert_themed(signed_in_again("bo").get("/admin/streams/stream/"), 403, "Your account may not see this")
    strict = Client(enforce_csrf_checks=True)
    assert_themed(strict.post("/admin/login/", {"username": "x"}), 403, "The form was not accepted")


def signed_in_again(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.create(username=name, is_staff=True))
    return client


def test_failures_are_themed() -> None:
    request = RequestFactory().get("/admin/")
    answer = server_error(request)
    assert isinstance(answer, HttpResponseServerError)
    assert_themed(answer, 500, "The portal failed")
    assert_themed(bad_request(request, ValueError()), 400, "KVPORTAL_ALLOWED_HOSTS")


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/admin/", "/admin/streams/stream/"])
@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_an_absent_database_is_said_where_a_page_needs_it(
    path: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = signed_in(superuser=True)
    client.raise_request_exception = False

    def away(*_: object, **__: object) -> None:
        raise error("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", away)
        answer = client.get(path)
    assert_themed(answer, 503, "The database does not answer")
    assert client.get(path).status_code == 200


def test_the_log_has_no_traceback_of_a_refusal() -> None:
    (handler,) = (
        each
        for each in logging.root.handlers
        if any(isinstance(f, NoTracebackOfRefusals) for f in each.filters)
    )
    for status, has_traceback in ((403, False), (404, False), (500, True)):
        error = ValueError("why")
        record = logging.LogRecord("django.request", 30, "", 0, "text", (), (ValueError, error, None))
        record.status_code = status
        assert handler.filter(record)
        assert ("ValueError: why" in handler.format(record)) is has_traceback


def test_favicon_is_answered_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = Client().get("/favicon.ico")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "image/svg+xml"
    assert "max-age" in answer.headers["Cache-Control"]
    assert answer.content == LOGO.read_bytes()
    assert caplog.records == []


def test_api_answers_json_where_there_is_nothing() -> None:
    answer = Client().get("/v1/nothing", headers={"accept": "text/html"})
    assert answer.headers["Content-Type"] == "application/json"
