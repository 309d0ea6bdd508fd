"""Instances entered in the admin: validated, taken over at once, shown with those that registered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import reverse

from routing import console
from routing.instances.embedded import Entry
from routing.instances.etcd import EtcdClient
from routing.instances.keys import KeyNames
from routing.instances.model import LoadReport, Registration, Role, Snapshot, SourceStatus
from routing.instances.sources import EmbeddedSource, Instances
from routing.models import Instance, load_entered
from streams.status import Fault
from tests.instances.support import TestEtcd, quick_settings, registration_value
from tests.support.waiting import wait_until


class Running:
    """A portal, with the embedded registry unless told otherwise, as the admin sees it."""

    def __init__(self, instances: Instances | None = None) -> None:
        self.instances = instances or Instances.embedded(load_entered=load_entered)
        self.excluded: Mapping[str, Fault] = {}

    def snapshot(self) -> Snapshot:
        return self.instances.registry.snapshot()

    def status(self) -> SourceStatus:
        return self.instances.source.status()

    def exclusions(self) -> Mapping[str, Fault]:
        return self.excluded

    def reload_entered(self) -> None:
        self.instances.source.reload_entered()


@pytest.fixture
def portal() -> Iterator[Running]:
    running = Running()
    running.instances.start()
    console.install(running)
    yield running
    console.install(None)
    running.instances.stop()


@pytest.mark.django_db
def test_entered_instances_are_loaded_at_the_start() -> None:
    Instance.objects.create(name="10.0.0.1:8000", role="PREFILL", dp_size=2, ttl_s=30.0)
    Instance.objects.create(name="10.0.0.2:8000", enabled=False)
    (entry,) = load_entered()
    registration = entry.registration
    assert isinstance(entry, Entry)
    assert (registration.name, registration.role, registration.dp_size) == ("10.0.0.1:8000", Role.PREFILL, 2)
    assert entry.ttl == 30.0
    assert registration.identity, "without an identity its hits would never count"
    running = Running()
    running.instances.start()
    assert set(running.snapshot().by_name) == {"10.0.0.1:8000"}
    running.instances.stop()


@pytest.mark.django_db(transaction=True)
def test_a_change_in_the_admin_is_in_force_once_it_is_saved(portal: Running, admin_client: Client) -> None:
    def save(url: str, **fields: object) -> None:
        form = {"name": "10.0.0.1:8000", "enabled": "on", "role": "DEFAULT", "dp_size": 1, "backend": "xllm"}
        answer = admin_client.post(url, {**form, **fields})
        assert answer.status_code == 302, answer.context["adminform"].form.errors

    save(reverse("admin:routing_instance_add"))
    view = portal.snapshot().by_name["10.0.0.1:8000"]
    assert (view.role, view.dp_size) == (Role.DEFAULT, 1)
    row = Instance.objects.get()
    save(reverse("admin:routing_instance_change", args=[row.pk]), dp_size=4, role="PREFILL")
    changed = portal.snapshot().by_name["10.0.0.1:8000"]
    assert (changed.role, changed.dp_size, changed.order) == (Role.PREFILL, 4, view.order)
    admin_client.post(reverse("admin:routing_instance_delete", args=[row.pk]), {"post": "yes"})
    assert not portal.snapshot().by_name["10.0.0.1:8000"].registered


@pytest.mark.django_db(transaction=True)
def test_what_is_entered_does_not_touch_an_instance_that_registered_by_itself(
    portal: Running, admin_client: Client
) -> None:
    registration = Registration("10.0.0.1:8000", Role.DECODE, "one")
    portal.instances.registry.put(registration, 60.0)
    row = Instance.objects.create(name="10.0.0.1:8000", role="PREFILL")
    assert portal.snapshot().by_name["10.0.0.1:8000"].registration == registration
    row.delete()
    assert portal.snapshot().by_name["10.0.0.1:8000"].registered


@pytest.mark.needs("etcd")
@pytest.mark.django_db(transaction=True)
def test_with_etcd_what_is_entered_has_no_effect_and_that_is_said(
    common_etcd: TestEtcd, admin_client: Client
) -> None:
    registered, entered = "10.0.0.1:8000", "10.0.0.2:8000"
    with closing(EtcdClient(quick_settings(common_etcd.endpoint))) as client:
        client.put(KeyNames().registration(Role.DECODE, registered), registration_value("one"))
    running = Running(Instances.from_etcd(quick_settings(common_etcd.endpoint)))
    running.instances.start()
    console.install(running)
    try:
        wait_until(lambda: registered in running.snapshot().by_name)
        for name in (registered, entered):
            form = {"name": name, "enabled": "on", "role": "PREFILL", "dp_size": 1, "backend": "xllm"}
            page = admin_client.post(reverse("admin:routing_instance_add"), form, follow=True)
            assert "is kept and has no effect" in page.content.decode()
        assert {view.name: view.role for view in running.snapshot().instances} == {registered: Role.DECODE}
    finally:
        console.install(None)
        running.instances.stop()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "nonsense"}, "name"),
        ({"name": "0.0.0.0:80"}, "name"),
        ({"name": "a b:80"}, "name"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 5000}, "dp_size"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 1e9}, "ttl_s"),
        ({"role": "BOTH"}, "role"),
    ],
)
@pytest.mark.django_db
def test_what_makes_no_sense_is_refused_with_the_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Instance(**{"name": "10.0.0.1:8000", **fields}).full_clean()
    assert set(caught.value.message_dict) == {named}


@pytest.mark.django_db
def test_the_list_shows_those_that_registered_and_those_that_were_entered(
    portal: Running, admin_client: Client
) -> None:
    Instance.objects.create(name="10.0.0.9:8000", note="the old one")
    registry = portal.instances.registry
    registry.put(Registration("10.0.0.1:8000", Role.MIX, "abc", dp_size=2), 60.0)
    registry.heartbeat("10.0.0.1:8000", "abc", LoadReport(17, 0.25))
    portal.excluded = {"10.0.0.1:8000": Fault("role", "it has the decode role")}
    page = admin_client.get(reverse("admin:routing_instance_changelist")).content.decode()
    for text in (
        "10.0.0.1:8000",
        "ACTIVE",
        "MIX (DECODE now)",
        "abc",
        "17 waiting",
        "it has the decode role",
        "the old one",
    ):
        assert text in page


@pytest.mark.django_db
def test_the_list_says_what_to_do_when_there_is_nothing(admin_client: Client) -> None:
    url = reverse("admin:routing_instance_changelist")
    assert "manage.py serve" in admin_client.get(url).content.decode()
    running = Running()
    console.install(running)
    try:
        assert "No instance is registered" in admin_client.get(url).content.decode()
    finally:
        console.install(None)


@pytest.mark.django_db
def test_the_number_of_queries_does_not_depend_on_the_number_of_rows(
    portal: Running, admin_client: Client, django_assert_max_num_queries: object
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    counts = []
    for rows in (2, 50):
        for n in range(rows):
            Instance.objects.get_or_create(name=f"10.0.0.{n}:8000")
        portal.reload_entered()
        with CaptureQueriesContext(connection) as queries:
            admin_client.get(reverse("admin:routing_instance_changelist"))
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_a_database_that_fails_leaves_everything_as_it_was_and_is_shown() -> None:
    answers: list[list[Entry]] = [[Entry(Registration("10.0.0.1:8000"))]]

    def load() -> list[Entry]:
        if answers:
            return answers.pop()
        raise OSError("the disk is full")

    instances = Instances.embedded(load_entered=load)
    instances.start()
    assert isinstance(instances.source, EmbeddedSource)
    instances.source.reload_entered()
    assert set(instances.registry.snapshot().by_name) == {"10.0.0.1:8000"}
    assert "the disk is full" in (instances.source.status().error or "")
    instances.stop()
