"""The lock files: complete, pinned, hashed, and in step with what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.txt", "requirements-uvicorn.txt", "requirements-dev.txt")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def entries(lock: str) -> list[str]:
    """The logical lines of a lock file, comments left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / lock).read_text())
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def pins(lock: str) -> dict[str, str]:
    """Canonical name -> the one version."""
    found: dict[str, str] = {}
    for entry in entries(lock):
        requirement = Requirement(entry.split(" --hash")[0])
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{lock}: {requirement} is not pinned"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_entry_is_one_version_with_hashes_and_nothing_else(lock: str) -> None:
    assert pins(lock)
    for entry in entries(lock):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{lock}: {entry[:60]} has no hash"
        assert "://" not in entry, f"{lock}: {entry[:60]} names a host"


@pytest.mark.parametrize(
    ("lock", "extras"), [*zip(LOCKS, ((), ("uvicorn",), ("uvicorn", "dev")), strict=True)]
)
def test_the_lock_satisfies_what_the_project_asks_for(lock: str, extras: tuple[str, ...]) -> None:
    wanted = list(project()["dependencies"])
    for extra in extras:
        wanted += project()["optional-dependencies"][extra]
    locked = pins(lock)
    for text in wanted:
        requirement = Requirement(text)
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{lock} lacks {text}: run `make lock`"
        assert requirement.specifier.contains(version), f"{lock} has {version}, not {text}: run `make lock`"


def test_what_is_tested_is_what_is_shipped() -> None:
    development = pins("requirements-dev.txt")
    for lock in LOCKS[:2]:
        assert pins(lock).items() <= development.items()


@pytest.mark.parametrize("version", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
@pytest.mark.parametrize(
    ("platform", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]
)
def test_the_lock_is_complete_on_every_python_we_support(version: str, platform: str, machine: str) -> None:
    """With hashes pip refuses a package that is not listed, and some are needed on some Pythons only."""
    locked = pins("requirements-dev.txt")
    environment = {
        "extra": "",
        "platform_machine": machine,
        "platform_system": platform.title(),
        "python_full_version": version,
        "python_version": version.rpartition(".")[0],
        "sys_platform": platform,
    }
    for name in locked:
        for text in metadata.distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert canonicalize_name(requirement.name) in locked, f"{name} needs {text}"
