from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from kvportal import records
from kvportal.models import Replica
from kvportal.opsstate import replica_state
from kvportal.records import ReplicaView
from routing import console as routing_console
from routing.instances.model import SourceStatus
from streams import console
from streams.models import ResyncRequest, Stream, StreamStateChange
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
        self.elsewhere: frozenset[StreamId] = frozenset()
        """What another replica follows."""
        self.orders: list[ResyncOrder] = []

    def statuses(self) -> tuple[StreamStatus, ...] | None:
        return self.now_statuses

    def followed(self) -> frozenset[StreamId] | None:
        here = self.now_statuses
        return None if here is None else self.elsewhere.union(one.spec.id for one in here)

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
    portal.elsewhere = frozenset({spec(3).id})
    page = text_of(viewer.get(LIST))
    assert "10.0.0.1:8000/dp0" in page
    assert '<span class="kv-badge kv-badge-good">synchronized</span>' in page
    assert '<span class="kv-badge kv-badge-bad">unsynchronized</span>' in page
    assert "message 12 followed 9: 2 missing" in page
    assert '<span class="kv-badge kv-badge-off">on another replica</span>' in page


def test_list_filters_by_the_state_in_memory(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), lost(2), status(4, 1))
    records.touch_streams([spec(3)], NOW)

    def shown(state: str) -> list[str]:
        return [str(row) for row in viewer.get(LIST, {"state": state}).context["cl"].result_list]

    assert shown("synchronized") == ["10.0.0.1:8000/dp0", "10.0.0.4:8000/dp1"]
    assert shown("unsynchronized") == ["10.0.0.2:8000/dp0"]
    assert shown("syncing") == []
    assert shown("not_followed") == ["10.0.0.3:8000/dp0"]
    assert shown("all") == [f"10.0.0.{n}:8000/dp{int(n == 4)}" for n in (1, 2, 3, 4)]


# ---- what nobody follows any more


def leave(portal: FakeConsole, *statuses: StreamStatus) -> None:
    """These stay; the others that were followed are left at NOW + 60."""
    left = {one.spec.id for one in portal.now_statuses or ()} - {one.spec.id for one in statuses}
    portal.now_statuses = statuses
    records.leave_streams(left, NOW + 60)


def test_list_leaves_out_what_nobody_follows_and_says_so(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1), status(2), status(3))
    assert "not shown" not in text_of(operator.get(LIST))
    leave(portal, status(1))
    page = text_of(operator.get(LIST))
    assert "10.0.0.2:8000" not in page
    assert "2 streams that the portal no longer follows are not shown." in page
    assert 'href="?state=not_followed"' in page
    assert "1 stream that the portal no longer follows is not shown." in text_of(
        operator.get(LIST, {"q": "10.0.0.2"})
    )
    page = text_of(operator.get(LIST, {"state": "not_followed"}))
    assert page.count("no longer followed</span>") == 2
    assert 'title="2027-01-15 08:01:00 UTC"' in page
    assert "resync/" not in page


def test_page_of_a_stream_that_nobody_follows_says_so(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1, counters={"gaps": 1}))
    row = Stream.objects.get()
    page = text_of(operator.get(f"{LIST}{row.pk}/change/"))
    assert 'id="ops-absent" class="kv-banner kv-banner-info" hidden>' in page
    leave(portal)
    page = text_of(operator.get(f"{LIST}{row.pk}/change/"))
    assert 'id="ops-absent" class="kv-banner kv-banner-info">' in page
    assert "The portal does not follow this stream any more" in page
    assert "Last followed on 2027-01-15 at 08:01:00 UTC" in page
    for part in ("charts", "counters", "resync"):
        assert re.search(rf'id="ops-{part}"[^>]* hidden>', page), part
    portal.elsewhere = frozenset({spec(1).id})
    page = text_of(operator.get(f"{LIST}{row.pk}/change/"))
    assert "Another replica follows this stream" in page
    assert "any more" not in page


def test_resync_of_what_nobody_follows_is_refused_at_once(operator: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    row = Stream.objects.get()
    leave(portal)
    sentence = "10.0.0.1:8000/dp0 is no longer followed, so there is nothing to resynchronise in it."
    path = f"{LIST}{row.pk}/resync/"
    for answer in (operator.get(path, follow=True), operator.post(path, {"confirmed": "yes"}, follow=True)):
        assert answer.redirect_chain == [(f"{LIST}{row.pk}/change/", 302)]
        assert sentence in text_of(answer)
    form = {"action": "force_resync", "_selected_action": [row.pk], "confirmed": "yes"}
    answer = operator.post(f"{LIST}?state=all", form, follow=True)
    assert f'<li class="error">{sentence}' in text_of(answer)
    refused = post_json(operator, {"targets": [{"instance_name": "10.0.0.1:8000", "dp_rank": 0}]})
    assert (refused.status_code, refused.json()) == (404, {"error": sentence})
    assert post_json(operator, {"targets": None}).json() == {"error": "No stream is followed now."}
    assert portal.orders == []


def test_selection_is_resynchronised_as_far_as_it_is_followed(operator: Client, portal: FakeConsole) -> None:
    follow(portal, *(status(number) for number in range(1, 10)))
    leave(portal, status(1))
    portal.elsewhere = frozenset({spec(2).id})
    form = {"action": "force_resync", "_selected_action": [row.pk for row in Stream.objects.all()]}
    question = text_of(operator.post(f"{LIST}?state=all", form))
    assert "these 2 streams" in question
    named = "10.0.0.3:8000/dp0, 10.0.0.4:8000/dp0, 10.0.0.5:8000/dp0, 10.0.0.6:8000/dp0, 10.0.0.7:8000/dp0"
    sentence = f"{named} and 2 more are no longer followed, so there is nothing to resynchronise in them."
    assert sentence in question
    assert portal.orders == []
    answer = operator.post(f"{LIST}?state=all", {**form, "confirmed": "yes"}, follow=True)
    assert f'<li class="warning">{sentence}' in text_of(answer)
    assert [order.scope for order in portal.orders] == ["10.0.0.1:8000/dp0, 10.0.0.2:8000/dp0"]
    targets = [{"instance_name": f"10.0.0.{number}:8000", "dp_rank": 0} for number in (3, 2)]
    answer = post_json(operator, {"targets": targets})
    assert answer.json() == {"streams": 1, "scope": "10.0.0.2:8000/dp0", "left_out": ["10.0.0.3:8000/dp0"]}


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
    assert "2027-01-15 08:00:00" in detail
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


def test_page_of_a_stream_asks_for_what_is_new(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1, counters={"events:BlockStored": 1234}))
    records.write_changes("here", [change(1, detail="old"), change(2, detail="of somebody else")])
    path = f"{LIST}{Stream.objects.get().pk}/changes/"
    newest = StreamStateChange.objects.get(detail="old").pk
    records.write_changes("here", [change(1, at=NOW + 1, detail="<new>")])
    answer = viewer.get(path, {"after": newest}).json()
    assert "&lt;new&gt;" in answer["rows"]
    assert answer["rows"].count("data-change=") == 1
    assert "1,234" in answer["counters"]
    everything = viewer.get(path).json()["rows"]
    assert everything.index("&lt;new&gt;") < everything.index("old")
    assert "somebody" not in everything
    assert viewer.get(path, {"after": newest + 9}).json()["rows"].strip() == ""


def test_series_of_a_stream(viewer: Client, portal: FakeConsole) -> None:
    follow(portal, status(1))
    answer = viewer.get(f"{LIST}{Stream.objects.get().pk}/series/")
    assert answer.json() == {"series": {"at": [NOW], "device": [1.0]}}


@pytest.mark.parametrize("path", ["{}/change/", "{}/series/", "{}/changes/"])
def test_pages_of_a_stream_need_the_permission(portal: FakeConsole, path: str) -> None:
    follow(portal, status(1))
    assert signed_in().get(LIST + path.format(Stream.objects.get().pk)).status_code == 403


@pytest.mark.parametrize(
    "path", ["4711/change/", "x/change/", "4711/series/", "4711/changes/", "4711/resync/"]
)
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
    follow(portal, status(1))
    target = {"instance_name": "10.0.0.1:8000", "dp_rank": 0}
    assert post_json(operator, {"targets": [target], "drop": True}).status_code == 202
    ordered = post_json(operator, {"targets": None}).json()
    assert ordered == {"streams": 1, "scope": "all streams", "left_out": []}
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
    assert "not known here" in text_of(operator.get(LIST))
    assert list(operator.get(LIST, {"state": "not_followed"}).context["cl"].result_list) == []
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


NAMES = {
    "streams": "Streams",
    "history": "State changes",
    "audit": "Resyncs",
    "replicas": "Replicas",
}


@pytest.mark.parametrize("name", LISTS)
def test_page_has_one_name_everywhere(portal: FakeConsole, name: str) -> None:
    fill(portal, 1)
    admin, path, called = signed_in(superuser=True), LISTS[name], NAMES[name]
    page = text_of(admin.get(path))
    link = re.search(rf'<a href="{path}"[^>]*>([^<]+)</a>', page)
    assert link is not None
    assert link[1] == called
    assert f"<h1>{called}</h1>" in page
    assert f"<title>{called} | " in page
    assert f'<a href="/admin/">Operations</a> &rsaquo; {called}' in page
    row = admin.get(path).context["cl"].result_list[0]
    detail = text_of(admin.get(f"{path}{row.pk}/change/"))
    assert f'<a href="/admin/">Operations</a> &rsaquo; <a href="{path}">{called}</a>' in detail
    assert "historylink" not in detail, "there is no log of such a row"
    assert "Home" not in page + detail


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kind", "words"), [("embedded", "its own registration counts"), ("etcd", "has no effect")]
)
def test_form_of_an_instance_says_what_an_entry_is_worth(kind: str, words: str) -> None:
    status = SourceStatus(kind=kind, connected=True, since=NOW, error=None)
    routing_console.install(SimpleNamespace(status=lambda: status))  # type: ignore[arg-type]
    try:
        assert words in text_of(signed_in(superuser=True).get("/admin/routing/instance/add/"))
    finally:
        routing_console.install(None)


@pytest.mark.parametrize(
    "path", ["auth/", "auth/user/", "auth/user/1/change/", "auth/user/1/history/", "password_change/"]
)
def test_pages_of_django_begin_where_the_others_do(path: str) -> None:
    admin = signed_in(superuser=True)
    User.objects.update(id=1)
    admin.force_login(User.objects.get())
    page = text_of(admin.get(f"/admin/{path}"))
    assert '<div class="breadcrumbs"> <a href="/admin/">Operations</a> &rsaquo;' in page
    assert "Home" not in page


def test_replica_shows_each_stream_as_it_sees_it(viewer: Client) -> None:
    records.write_replica(ReplicaView("here", NOW - 9, NOW, replica_state([status(1), lost(2)])))
    path = f"{LISTS['replicas']}{Replica.objects.get().pk}/change/"
    page = text_of(viewer.get(path))
    assert '<th scope="row">10.0.0.2:8000/dp0</th>' in page
    assert "sequence_gap" in page
    assert "{" not in page.partition("<main")[2].partition("</main")[0], "no JSON for people"


def test_state_of_every_kind_has_a_filter(viewer: Client, portal: FakeConsole) -> None:
    page = text_of(viewer.get(LIST))
    for state in StreamState:
        assert f"?state={state}" in page
