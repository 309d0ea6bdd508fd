"""Fixtures of the tests about instances. Tests that use an etcd are to be marked as needing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.instances.support import TestEtcd, etcd_post


@pytest.fixture(scope="package")
def running_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEtcd]:
    with TestEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def common_etcd(running_etcd: TestEtcd) -> TestEtcd:
    """An empty etcd that other tests use after this one: not to be stopped or frozen."""
    etcd_post(running_etcd, "kv/deleterange", {"key": "AA==", "range_end": "AA=="})
    return running_etcd


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[TestEtcd]:
    """An etcd of this test's own, to be maltreated."""
    with TestEtcd(tmp_path) as server:
        yield server


@pytest.fixture
def guarded_etcd(own_etcd: TestEtcd) -> TestEtcd:
    """An etcd of this test's own that lets only `root` in, with the password `secret`."""
    own_etcd.ask_for_password("secret")
    return own_etcd
