"""Who may see and do what: every page and action of the portal against every kind of person."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from kvportal import records
from kvportal.models import Replica
from kvportal.records import ReplicaView
from routing import console as routing_console
from routing.decision_log import Written
from routing.decision_models import Decision, RecordedPrompt
from routing.decision_store import DecisionStore
from routing.policies.decision import Policy, Settings
from streams import console
from streams.models import ResyncRequest, Stream, StreamStateChange
from tests.admin.test_history import order
from tests.admin.test_lab import HELD, HOLDER_AND_IDLE, PROMPT, portal
from tests.admin.test_pages import FakeConsole
from tests.admin.values import NOW, change, spec, status

ANONYMOUS, OUTSIDER, BARE, VIEWER, OPERATOR = "anonymous", "no staff", "bare staff", "view only", "resync"
PEOPLE = (ANONYMOUS, OUTSIDER, BARE, VIEWER, OPERATOR)
SEE = {VIEWER: 200, OPERATOR: 200}
"""What only those with the view permissions get; others: 403, or the login page without staff."""
DO = {OPERATOR: 200}
EVERYONE_WITH_STAFF = {BARE: 200, VIEWER: 200, OPERATOR: 200}
NOBODY: dict[str, int] = {}

ADMIN = "/admin/"
STREAM, DECISION = f"{ADMIN}streams/stream/", f"{ADMIN}routing/decision/"
HISTORY, AUDIT = f"{ADMIN}streams/streamstatechange/", f"{ADMIN}streams/resyncrequest/"
REPLICA, INSTANCE = f"{ADMIN}kvportal/replica/", f"{ADMIN}routing/instance/"
ORDER = '{"targets": null}'

GETS = {
    ADMIN: EVERYONE_WITH_STAFF,
    STREAM: SEE,
    f"{STREAM}1/change/": SEE,
    f"{STREAM}1/series/": SEE,
    f"{STREAM}1/changes/": SEE,
    f"{STREAM}explorer/": SEE,
    f"{STREAM}find/?instance=10.0.0.1:8000&rank=0": {VIEWER: 302, OPERATOR: 302},
    f"{STREAM}1/resync/": DO,
    f"{STREAM}1/delete/": NOBODY,
    f"{STREAM}add/": NOBODY,
    HISTORY: SEE,
    f"{HISTORY}1/change/": SEE,
    f"{HISTORY}1/delete/": NOBODY,
    AUDIT: SEE,
    f"{AUDIT}1/change/": SEE,
    f"{AUDIT}1/delete/": NOBODY,
    REPLICA: SEE,
    f"{REPLICA}1/change/": SEE,
    f"{REPLICA}1/delete/": NOBODY,
    INSTANCE: SEE,
    f"{INSTANCE}add/": NOBODY,
    DECISION: SEE,
    f"{DECISION}1/change/": SEE,
    f"{DECISION}1/delete/": NOBODY,
    f"{DECISION}lab/": SEE,
    f"{DECISION}prompt/?id={'0' * 32}": SEE,
    f"{DECISION}find/?id={'0' * 32}": {VIEWER: 302, OPERATOR: 302},
    f"{ADMIN}auth/user/": NOBODY,
    f"{ADMIN}password_change/": EVERYONE_WITH_STAFF,
}
POSTS = {
    f"{STREAM}explore/": SEE,
    f"{STREAM}resync/": {OPERATOR: 202},
    f"{STREAM}1/resync/": {OPERATOR: 302},
    f"{STREAM}1/change/": NOBODY,
    f"{HISTORY}1/change/": NOBODY,
    f"{AUDIT}1/change/": NOBODY,
    f"{REPLICA}1/change/": NOBODY,
    f"{DECISION}1/change/": NOBODY,
    f"{DECISION}1/delete/": NOBODY,
    f"{INSTANCE}add/": NOBODY,
}


class Explorable(FakeConsole):
    def explore(self, prompt: bytes) -> dict[str, object]:
        return {"tokens": len(prompt) // 4, "streams": [], "routing": None}


@pytest.fixture
def everything(db: None) -> Iterator[FakeConsole]:
    """One row of each kind, all with the number 1, and a portal that runs."""
    records.touch_streams([spec(1)], NOW)
    records.write_changes("here", [change(1)])
    ResyncRequest.record(order())
    records.write_replica(ReplicaView("here", NOW - 9, NOW, {"streams": {}}))
    selector = portal(HOLDER_AND_IDLE, HELD, Settings(policy=Policy.CAR))
    selector.select(PROMPT)
    DecisionStore().write([Written(record) for record in selector.decisions.recent()])
    # A database that earlier tests have used goes on counting where they left off.
    Decision.objects.update(id=1, decision_id="0" * 32)
    for model in (Stream, StreamStateChange, ResyncRequest, Replica):
        model.objects.update(id=1)
    RecordedPrompt.objects.create(decision_id="0" * 32, at=Decision.objects.get().at, token_ids=b"")
    own = Explorable()
    own.now_statuses = (status(1),)
    console.install(own)
    yield own
    console.install(None)
    routing_console.install(None)


def client_of(person: str) -> Client:
    client = Client()
    if person != ANONYMOUS:
        user = User.objects.create(username="pat", is_staff=person != OUTSIDER)
        views = Permission.objects.filter(
            content_type__app_label__in=("streams", "kvportal", "routing"), codename__startswith="view_"
        )
        if person in (OUTSIDER, VIEWER, OPERATOR):
            user.user_permissions.set(views)
        if person in (OUTSIDER, OPERATOR):
            user.user_permissions.add(Permission.objects.get(codename="resync_stream"))
        client.force_login(user)
    return client


def expected(person: str, allowed: dict[str, int]) -> int:
    if person in (ANONYMOUS, OUTSIDER):
        return 302
    return allowed.get(person, 403)


@pytest.mark.parametrize("person", PEOPLE)
def test_pages_open_to_those_they_are_for(everything: FakeConsole, person: str) -> None:
    client = client_of(person)
    answers = {path: client.get(path) for path in GETS}
    assert {path: answer.status_code for path, answer in answers.items()} == {
        path: expected(person, allowed) for path, allowed in GETS.items()
    }
    if person in (ANONYMOUS, OUTSIDER):
        assert all(answer["Location"].startswith("/admin/login/") for answer in answers.values())


@pytest.mark.parametrize("person", PEOPLE)
def test_actions_obey_those_they_are_for(everything: FakeConsole, person: str) -> None:
    client = client_of(person)
    answers = {}
    for path in POSTS:
        body = {"data": ORDER, "content_type": "application/json"} if path == f"{STREAM}resync/" else {}
        body = {"data": "1, 2", "content_type": "text/plain"} if path == f"{STREAM}explore/" else body
        answers[path] = client.post(path, **body)  # type: ignore[arg-type]
    assert {path: answer.status_code for path, answer in answers.items()} == {
        path: expected(person, allowed) for path, allowed in POSTS.items()
    }
    assert len(everything.orders) == (2 if person == OPERATOR else 0)
    assert Stream.objects.count() == Decision.objects.count() == ResyncRequest.objects.count() == 1


@pytest.mark.parametrize("person", PEOPLE)
def test_action_of_the_list_is_offered_to_those_who_may(everything: FakeConsole, person: str) -> None:
    form = {"action": "force_resync", "_selected_action": ["1"], "confirmed": "yes"}
    client_of(person).post(STREAM, form)
    assert len(everything.orders) == (1 if person == OPERATOR else 0)


def own_paths() -> set[str]:
    """The routes of the portal's own pages in the admin, with a number for each parameter."""

    def walk(patterns: list[URLPattern | URLResolver], prefix: str) -> Iterator[str]:
        for pattern in patterns:
            route = prefix + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, route)
            else:
                yield "/" + route.replace("<int:pk>", "1").replace("<path:object_id>", "1")

    return {path for path in walk(get_resolver().url_patterns, "") if path.startswith(ADMIN)}


def test_no_page_is_forgotten_here() -> None:
    """A new page or action needs a row in the tables above."""
    ours = {path for path in own_paths() if path.split("/")[2] in ("streams", "routing", "kvportal")}
    known = {path.partition("?")[0] for path in (*GETS, *POSTS)}
    # Django's own: its history pages, and aliases that lead to the change pages.
    rest = {path for path in ours - known if not path.endswith(("/history/", "/1/", "/delete/", "/add/"))}
    assert rest == {f"{INSTANCE}1/change/"}
