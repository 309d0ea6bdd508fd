from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from kvportal import records
from kvportal.records import ReplicaView
from streams import console
from streams.models import ResyncRequest, Stream
from streams.resync import OutcomeState, ResyncOrder, ResyncOutcome, ResyncSource, ResyncTarget
from streams.spec import StreamId
from streams.status import StreamState, StreamStatus
from tests.admin.values import NOW, change, lost, spec, status

pytestmark = pytest.mark.django_db

LIST = "/admin/streams/stream/"
LISTS = {
    "streams": LIST,
    "history": "/admin/streams/streamstatechange/",
    "audit": "/admin/streams/resyncrequest/",
    "replicas": "/admin/kvportal/replica/",
}


class FakeConsole:
    """The running portal as the admin sees it."""

    def __init__(self) -> None:
        self.now_statuses: tuple[StreamStatus, ...] | None = ()
        self.orders: list[ResyncOrder] = []

    def statuses(self) -> tuple[StreamStatus, ...] | None:
        return self.now_statuses

    def series(self, stream: StreamId) -> dict[str, list[float | None]] | None:
        return {"at": [NOW], "device": [1.0]}

    def order_resync(self, order: ResyncOrder) -> int:
        self.orders.append(order)
        return 1


@pytest.fixture
def portal() -> Iterator[FakeConsole]:
    own = FakeConsole()
    console.install(own)
    yield own
    console.install(None)


def follow(portal: FakeConsole, *statuses: StreamStatus) -> None:
    portal.now_statuses = statuses
    records.touch_streams([one.spec for one in statuses], NOW)


def signed_in(*permissions: str, superuser: bool = False, staff: bool = True) -> Client:
    user = User.objects.create(username="pat", is_staff=staff, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def viewer() -> Client:
    return signed_in("view_stream", "view_streamstatechange", "view_resyncrequest", "view_replica")


@pytest.fixture
def operator() -> Client:
    return signed_in("view_stream", "resync_stream", "view_resyncrequest")


def text_of(response: Any) -> str:
    assert response.status_code == 200, response
    return " ".join(response.content.decode().split())


# ---- the list


def test_list_shows_the_live_state_of_each_stream(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), lost(2))
    records.touch_streams([spec(3)], NOW)
    page = text_of(viewer.get(LIST))
    assert "10.0.0.1:8000/dp0" in page
    assert '<span class="kv-badge kv-badge-good">synchronized</span>' in page
    assert '<span class="kv-badge kv-badge-bad">unsynchronized</span>' in page
    assert "message 12 followed 9: 2 missing" in page
    assert '<span class="kv-badge kv-badge-off">not followed</span>' in page


def test_list_filters_by_the_state_in_memory(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), lost(2), status(4, 1))
    records.touch_streams([spec(3)], NOW)

    def shown(state: str) -> list[str]:
        return [str(row) for row in viewer.get(LIST, {"state": state}).context["cl"].result_list]

    assert shown("synchronized") == ["10.0.0.1:8000/dp0", "10.0.0.4:8000/dp1"]
    assert shown("unsynchronized") == ["10.0.0.2:8000/dp0"]
    assert shown("syncing") == []
    assert shown("not_followed") == ["10.0.0.3:8000/dp0"]


def test_list_is_searched_by_instance_and_endpoint(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), lost(2))
    for search in ("10.0.0.2:8000", spec(2).endpoint, spec(2).replay_endpoint):
        rows = viewer.get(LIST, {"q": search}).context["cl"].result_list
        assert [str(row) for row in rows] == ["10.0.0.2:8000/dp0"]


def test_names_from_engines_cannot_inject_markup(viewer: Client, portal: FakeConsole) -> None:
    from dataclasses import replace

    evil = lost(2)
    evil = replace(evil, error=replace(evil.error, sentence="<script>alert(1)</script>"))  # type: ignore[type-var]
    follow(portal, evil)
    assert "<script>alert" not in text_of(viewer.get(LIST))


def fill(portal: FakeConsole, number: int) -> None:
    follow(portal, *(status(n) for n in range(number)))
    records.write_changes("here", [change(n) for n in range(number)])
    for n in range(number):
        order = ResyncOrder("ann", ResyncSource.API, NOW, (ResyncTarget(f"10.0.0.{n}:8000"),))
        for replica in ("here", "there"):
            records.write_outcome(ResyncOutcome(order, replica, NOW, OutcomeState.DONE, 1, 1, "fine"))
        records.write_replica(ReplicaView(f"replica-{n}", NOW, NOW, {"streams": {}}))


@pytest.mark.parametrize("path", LISTS.values(), ids=LISTS)
def test_lists_take_the_same_number_of_queries_however_long_they_are(
    viewer: Client, portal: FakeConsole, path: str
) -> None:
    counts = []
    for number in (2, 60):
        fill(portal, number)
        viewer.get(path)  # permissions and content types are cached from here on
        with CaptureQueriesContext(connection) as queries:
            assert viewer.get(path).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]
    assert counts[1] <= 8


def test_lists_tell_the_second(viewer: Client) -> None:
    records.write_changes("here", [change()])
    assert "2027-01-15 08:00:00" in text_of(viewer.get(LISTS["history"]))


@pytest.mark.parametrize("path", LISTS.values(), ids=LISTS)
def test_lists_are_read_only(portal: FakeConsole, path: str) -> None:
    fill(portal, 1)
    admin = signed_in(superuser=True)
    assert admin.get(f"{path}add/").status_code == 403
    page = text_of(admin.get(path))
    assert "delete_selected" not in page


@pytest.mark.parametrize("path", LISTS.values(), ids=LISTS)
def test_lists_need_their_permission(portal: FakeConsole, path: str) -> None:
    assert signed_in().get(path).status_code == 403


def test_audit_shows_who_what_and_the_outcome_of_each_replica(viewer: Client, portal: FakeConsole) -> None:
    fill(portal, 1)
    page = text_of(viewer.get(LISTS["audit"]))
    for words in ("ann", "HTTP API", "10.0.0.0:8000", "Done</span> here", "Done</span> there"):
        assert words in page
    row = ResyncRequest.objects.get()
    detail = text_of(viewer.get(f"{LISTS['audit']}{row.pk}/change/"))
    assert "fine" in detail
    assert "there" in detail


def test_order_that_no_replica_took_up_says_so(viewer: Client) -> None:
    ResyncRequest.record(ResyncOrder("ann", ResyncSource.PAGE, NOW))
    assert "no replica yet" in text_of(viewer.get(LISTS["audit"]))


def test_replica_that_stopped_writing_is_shown_as_gone(viewer: Client) -> None:
    import time

    now = time.time()
    records.write_replica(ReplicaView("alive", now - 60, now, {"streams": {}}))
    records.write_replica(ReplicaView("dead", now - 600, now - 60, {"streams": {}}))
    page = text_of(viewer.get(LISTS["replicas"]))
    assert page.count(">gone</span>") == 1
    assert page.count(">running</span>") == 1


# ---- one stream


def test_page_of_a_stream_shows_its_history_and_counters(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1, counters={"events:BlockStored": 1234}))
    records.write_changes("here", [change(1), change(2, detail="of somebody else")])
    row = Stream.objects.get()
    page = text_of(viewer.get(f"{LIST}{row.pk}/change/"))
    assert "message 12 followed 9" in page
    assert "sequence_gap" in page
    assert "1,234" in page
    assert "of somebody else" not in page
    assert "Force resync" not in page


def test_page_of_a_stream_is_found_by_name(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1, 1))
    found = viewer.get(f"{LIST}find/", {"instance": "10.0.0.1:8000", "rank": "1"})
    assert found.headers["Location"] == f"{LIST}{Stream.objects.get().pk}/change/"
    for query in ({}, {"instance": "10.0.0.1:8000"}, {"instance": "x", "rank": "1"}, {"rank": "9" * 40}):
        assert viewer.get(f"{LIST}find/", query).status_code == 404


def test_series_of_a_stream(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    answer = viewer.get(f"{LIST}{Stream.objects.get().pk}/series/")
    assert answer.json() == {"series": {"at": [NOW], "device": [1.0]}}


@pytest.mark.parametrize("path", ["{}/change/", "{}/series/"])
def test_pages_of_a_stream_need_the_permission(portal: FakeConsole, path: str) -> None:
    follow(portal, status(1))
    assert signed_in().get(LIST + path.format(Stream.objects.get().pk)).status_code == 403


@pytest.mark.parametrize("path", ["4711/change/", "x/change/", "4711/series/", "4711/resync/"])
def test_stream_that_does_not_exist_is_a_404(operator: Client, path: str) -> None:
    assert operator.get(LIST + path).status_code == 404


# ---- resync


def test_action_asks_and_then_orders(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), lost(2), status(3))
    chosen = [row.pk for row in Stream.objects.all()[:2]]
    form = {"action": "force_resync", "_selected_action": chosen}
    question = text_of(operator.post(LIST, form))
    assert "10.0.0.1:8000/dp0" in question
    assert 'name="drop"' in question
    assert portal.orders == []
    answer = operator.post(LIST, {**form, "confirmed": "yes"}, follow=True)
    assert "Resync ordered for 10.0.0.1:8000/dp0, 10.0.0.2:8000/dp0." in text_of(answer)
    order = portal.orders[0]
    assert (order.actor, order.source, order.drop) == ("pat", "admin", False)
    assert order.targets == (ResyncTarget("10.0.0.1:8000", 0), ResyncTarget("10.0.0.2:8000", 0))


def test_action_drops_only_when_the_box_is_ticked(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    form = {"action": "force_resync", "_selected_action": [Stream.objects.get().pk], "confirmed": "yes"}
    operator.post(LIST, {**form, "drop": "on"})
    assert [order.drop for order in portal.orders] == [True]


def test_button_of_a_row_asks_and_then_orders(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), status(2))
    path = reverse("admin:streams_stream_resync", args=[Stream.objects.first().pk])  # type: ignore[union-attr]
    assert path in text_of(operator.get(LIST))
    assert "Drop what the index holds first" in text_of(operator.get(path))
    assert portal.orders == []
    operator.post(path, {"confirmed": "yes", "drop": "on"})
    assert [(order.scope, order.drop) for order in portal.orders] == [("10.0.0.1:8000/dp0", True)]


def post_json(client: Client, body: Any) -> Any:
    text = body if isinstance(body, str) else json.dumps(body)
    return client.post(f"{LIST}resync/", text, content_type="application/json")


def test_page_orders_by_json(operator: Client, portal: FakeConsole) -> None:
    target = {"instance_name": "10.0.0.1:8000", "dp_rank": 0}
    assert post_json(operator, {"targets": [target], "drop": True}).status_code == 202
    assert post_json(operator, {"targets": None}).json() == {"streams": 1, "scope": "all streams"}
    first, second = portal.orders
    assert (first.actor, first.source, first.drop) == ("pat", "page", True)
    assert first.targets == (ResyncTarget("10.0.0.1:8000", 0),)
    assert second.scope == "all streams"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ({"drop": False}, "`targets` is missing"),
        ({"targets": []}, "1 to 1000 streams"),
        ({"targets": "all"}, "1 to 1000 streams"),
        ({"targets": None, "drop": "yes"}, "`drop` is true or false"),
        ({"targets": [{"instance_name": "a"}]}, "targets[0]"),
        ({"targets": [{"instance_name": "a", "dp_rank": 0}, 7]}, "targets[1]"),
        ({"targets": [{"instance_name": "a", "dp_rank": True}]}, "targets[0]"),
    ],
)
def test_order_that_makes_no_sense_is_refused_with_a_sentence(
    operator: Client, portal: FakeConsole, body: Any, words: str
) -> None:
    answer = post_json(operator, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert portal.orders == []


def test_without_the_permission_nothing_can_be_resynchronised(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    row = Stream.objects.get()
    page = text_of(viewer.get(LIST))
    assert "Force resync" not in page
    assert viewer.get(f"{LIST}{row.pk}/resync/").status_code == 403
    assert viewer.post(f"{LIST}{row.pk}/resync/", {"confirmed": "yes"}).status_code == 403
    form = {"action": "force_resync", "_selected_action": [row.pk], "confirmed": "yes"}
    viewer.post(LIST, form)
    refused = post_json(viewer, {"targets": None})
    assert refused.status_code == 403
    assert "may not resynchronise" in refused.json()["error"]
    assert portal.orders == []


def test_permission_without_staff_is_worth_nothing(portal: FakeConsole) -> None:
    outsider = signed_in("view_stream", "resync_stream", staff=False)
    for answer in (outsider.get(LIST), post_json(outsider, {"targets": None})):
        assert answer.status_code == 302
        assert answer.headers["Location"].startswith("/admin/login/")
    assert portal.orders == []


def test_orders_need_a_csrf_token(operator: Client, portal: FakeConsole) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = operator.cookies
    assert post_json(strict, {"targets": None}).status_code == 403
    assert portal.orders == []


def test_get_never_orders(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    assert operator.get(f"{LIST}resync/").status_code == 405
    operator.get(f"{LIST}{Stream.objects.get().pk}/resync/?confirmed=yes")
    assert portal.orders == []


def test_where_no_portal_runs_an_order_waits_in_the_database(operator: Client) -> None:
    assert console.console().statuses() is None
    records.touch_streams([spec(1)], NOW)
    assert "not followed" in text_of(operator.get(LIST))
    post_json(operator, {"targets": None})
    assert ResyncRequest.objects.get().actor == "pat"
    assert len(records.open_orders("anybody", 0, ResyncRequest.objects.get().order.at)) == 1


# ---- the landing page


def test_landing_page_is_the_operations_page(viewer: Client) -> None:
    page = text_of(viewer.get("/admin/"))
    assert 'data-socket="/ws/ops/"' in page
    assert 'data-may-resync="no"' in page
    assert "ops-resync-selected" not in page


def test_landing_page_offers_resyncs_to_those_who_may(operator: Client) -> None:
    page = text_of(operator.get("/admin/"))
    assert 'data-may-resync="yes"' in page
    assert "ops-resync-selected" in page


def test_landing_page_tells_what_is_missing_without_the_permission() -> None:
    page = text_of(signed_in().get("/admin/"))
    assert "Your account may not view streams" in page
    assert "data-socket" not in page
    assert "main.js" not in page


def test_navigation_shows_what_one_may_see(viewer: Client) -> None:
    page = text_of(viewer.get("/admin/"))
    assert 'href="/admin/streams/streamstatechange/"' in page
    assert 'href="/admin/auth/user/"' not in page


def test_state_of_every_kind_has_a_filter(viewer: Client, portal: FakeConsole) -> None:
    page = text_of(viewer.get(LIST))
    for state in StreamState:
        assert f"?state={state}" in page
