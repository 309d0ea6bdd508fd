"""Runs each benchmark in a process of its own and prints a table. See `benchmarks`."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from importlib import import_module

from benchmarks.report import print_rows

NAMES = ("memory", "query", "decision", "snapshot", "hot_stream", "idle", "ops_page")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--here", action="store_true", help="in this process (for a profiler)")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.here:
        for name in options.names:
            print_rows(import_module(f"benchmarks.{name}").run())
        return 0
    print(f"Python {platform.python_version()}, {platform.machine()}", flush=True)
    failed = 0
    for name in options.names or NAMES:
        failed |= subprocess.run([sys.executable, "-m", "benchmarks", "--here", name], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
