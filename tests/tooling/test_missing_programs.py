"""What happens to a test whose program is missing: loud skip on a laptop, failure on a CI machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import find_program

ROOT = Path(__file__).parents[2]

EXAMPLE = """
import pytest

@pytest.mark.needs("etcd")
def test_by_marker():
    raise AssertionError("ran without etcd")

def test_by_fixture(redis_server):
    raise AssertionError("ran without redis")

def test_that_needs_nothing():
    pass
"""


def run_example(tmp_path: Path, *, ci: str) -> subprocess.CompletedProcess[str]:
    """Run the example with the project's conftest on a PATH that has no program at all."""
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = needs(*programs): programs\naddopts = -p no:django -p no:cacheprovider -rs\n"
    )
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {"PATH": str(empty), "CI": ci, "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
    command = [sys.executable, "-m", "pytest", "test_example.py"]
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_skips_are_named_with_the_package_to_install(tmp_path: Path) -> None:
    result = run_example(tmp_path, ci="")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 2 skipped" in result.stdout
    assert "NOT TESTED ON THIS MACHINE" in result.stdout
    assert "1 test(s) skipped, not installed: etcd (apt-get install etcd-server)" in result.stdout
    assert "1 test(s) skipped, not installed: redis-server (apt-get install redis-server)" in result.stdout


def test_under_ci_a_missing_program_is_a_failure(tmp_path: Path) -> None:
    result = run_example(tmp_path, ci="true")
    assert result.returncode == 1, result.stdout
    assert "1 passed, 2 errors" in result.stdout
    assert "with CI=true every test must run" in result.stdout


def test_an_unknown_program_is_a_mistake_of_the_test() -> None:
    with pytest.raises(ValueError, match="unknown program 'mysql'; known: chromium, etcd, ip"):
        find_program("mysql")


def test_the_missing_packages_are_printed_for_the_installer(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.programs"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert {"etcd-server", "redis-server", "chromium", "make"} <= set(result.stdout.split())
