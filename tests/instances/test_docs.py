"""The page about instances tells the truth: its registration is read, its commands are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from routing.endpoints_instances import heartbeat_endpoint, put_endpoint
from routing.instances.core import HealthSettings
from routing.instances.embedded import LeaseTable
from routing.instances.keys import KeyNames
from routing.instances.model import HealthState, InstanceView, LoadReport, Role
from routing.instances.registration import parse_registration
from routing.instances.registry import InstanceRegistry
from routing.instances.sources import EtcdSource, Instances, Source
from tests.http import shells
from tests.http.servers import served
from tests.instances.support import TestEtcd, closed_port, quick_settings, registration_value
from tests.support.waiting import wait_until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "instances.md").read_text()
NAME = "10.0.0.7:8000"
needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="the page's commands use curl")


def block(language: str, containing: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (chosen,) = (text for text in found if containing in text)
    return str(chosen)


def run(script: str, **variables: str) -> None:
    done = subprocess.run(
        ["bash", "-euc", script], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check(view: InstanceView) -> None:
    assert (view.state, view.role, view.incarnation_id, view.dp_size) == (
        HealthState.ACTIVE,
        Role.DEFAULT,
        "Zq3-7",
        2,
    )


def test_the_registration_is_read_as_the_table_says() -> None:
    text = block("json", "incarnation_id")
    registration = parse_registration(NAME, text.encode())
    assert (registration.role, registration.dp_size, registration.incarnation_id) == (
        Role.PREFILL,
        2,
        "Zq3-7",
    )
    assert len(registration.ttft_profiling_data) == len(registration.tpot_profiling_data) == 3
    assert all(f"`{field}`" in PAGE for field in json.loads(text))


@needs_curl
def test_the_commands_for_http_register_an_instance_with_its_load() -> None:
    registry = InstanceRegistry(leases=LeaseTable())
    registry.start()
    endpoints = {"instance_put": put_endpoint(registry), "heartbeat": heartbeat_endpoint(registry)}
    try:
        with shells.portal(endpoints=endpoints), served(shells.MAX_BODY) as url:
            run(block("sh", "$PORTAL"), PORTAL=url, KVPORTAL_INTERNAL_API_TOKEN=shells.TOKEN)
        view = registry.snapshot().by_name[NAME]
        check(view)
        assert view.load is not None
        assert view.load.report == LoadReport(3, 0.25)
    finally:
        registry.stop()


@contextmanager
def following(etcd: TestEtcd, **more: str) -> Iterator[tuple[InstanceRegistry, Source]]:
    registry = InstanceRegistry(HealthSettings(0.3, 0.3))
    settings = quick_settings(etcd.endpoint, request_timeout=5.0, **more)
    instances = Instances(registry, EtcdSource(registry, settings, load_interval=0.05))
    instances.start()
    try:
        yield registry, instances.source
    finally:
        instances.stop()


@needs_curl
@pytest.mark.needs("etcd")
def test_the_commands_for_etcd_register_an_instance_with_its_load(common_etcd: TestEtcd) -> None:
    with following(common_etcd) as (registry, _):
        run(block("sh", "lease/grant"), ETCD=common_etcd.url)
        wait_until(lambda: (view := registry.snapshot().by_name.get(NAME)) and view.load)
        view = registry.snapshot().by_name[NAME]
        check(view)
        assert view.load is not None
        assert view.load.report == LoadReport(3, 0.25)


@pytest.mark.needs("etcd")
@pytest.mark.skipif(not shutil.which("etcdctl"), reason="the page's commands use etcdctl")
def test_the_rights_on_the_page_are_those_that_a_portal_needs(guarded_etcd: TestEtcd) -> None:
    guarded_etcd.add_user("portal", "secret", as_root="secret")
    with closed_port() as port:
        use_the_rights(guarded_etcd, f"127.0.0.1:{port}")


def use_the_rights(guarded_etcd: TestEtcd, name: str) -> None:
    root = {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": guarded_etcd.url, "ETCDCTL_USER": "root:secret"}
    put = f"etcdctl put {KeyNames().registration(Role.MIX, name)} '{registration_value('one').decode()}'"
    run(f"{block('sh', 'etcdctl')}\netcdctl user grant-role portal kvportal\n{put}", **root)
    with following(guarded_etcd, username="portal", password="secret") as (registry, source):
        wait_until(lambda: registry.snapshot().by_name, message=lambda: str(source.status()))
        registry.heartbeat(name, "one", LoadReport(5, 0.5))
        seen = f"etcdctl get {KeyNames().load(name)} | grep -q waiting"
        run(f"for i in $(seq 100); do {seen} && exit 0; sleep 0.1; done; exit 1", **root)
        run(f"etcdctl del {KeyNames().registration(Role.MIX, name)}", **root)
        wait_until(lambda: not registry.snapshot().by_name)
        run(f"for i in $(seq 100); do {seen} || exit 0; sleep 0.1; done; exit 1", **root)
