"""Programs that some tests need and that pip cannot install: where they are, what a missing one means."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable

PACKAGES = {
    "etcd": "etcd-server",
    "redis-server": "redis-server",
    "chromium": "chromium",
    "postgres": "postgresql",
    "ip": "iproute2",
    "make": "make",
}
"""Program -> Debian/Ubuntu package; `python -m tests.support.programs` prints those of the missing ones."""

_OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome", "google-chrome-stable")}
_OTHER_PLACES = {
    "postgres": ("/usr/lib/postgresql/*/bin/postgres", "/usr/local/bin/postgres"),
    "ip": ("/usr/sbin/ip", "/sbin/ip"),
}


def find_program(name: str) -> str | None:
    """The absolute path of a program, or None where it is not installed."""
    if name not in PACKAGES:
        raise ValueError(f"unknown program {name!r}; known: {', '.join(sorted(PACKAGES))}")
    for candidate in (name, *_OTHER_NAMES.get(name, ())):
        if path := shutil.which(candidate):
            return path
    found = [path for pattern in _OTHER_PLACES.get(name, ()) for path in sorted(glob.glob(pattern))]
    return found[-1] if found else None


def missing_programs(names: Iterable[str]) -> list[str]:
    return [name for name in names if find_program(name) is None]


def missing_text(names: Iterable[str]) -> str:
    """What is missing and how to get it."""
    names = list(names)
    packages = " ".join(PACKAGES[name] for name in names)
    return f"not installed: {', '.join(names)} (apt-get install {packages})"


def skips_are_failures() -> bool:
    """On a CI machine a test that cannot run is a failure, so that nothing goes untested unnoticed."""
    return os.environ.get("CI", "").lower() in {"true", "1", "yes"}


if __name__ == "__main__":
    print(*(PACKAGES[name] for name in missing_programs(PACKAGES)))
