"""A prepared data directory, made once: migrating takes longer than serving."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.portal import CHECKOUT, environment

STAFF = {"DJANGO_SUPERUSER_USERNAME": "olga", "DJANGO_SUPERUSER_PASSWORD": "correct horse"}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "var"
    for command in (["migrate", "--noinput"], ["createsuperuser", "--noinput", "--email=olga@example.com"]):
        subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=CHECKOUT,
            env=environment(directory, **STAFF),
            check=True,
            capture_output=True,
        )
    return directory


@pytest.fixture
def data_dir(prepared: Path, tmp_path: Path) -> Path:
    """A copy of this test's own: database prepared, user `olga` with all rights."""
    return Path(shutil.copytree(prepared, tmp_path / "var"))
