"""Child processes that are started together and ended together, each by its own pid."""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

STOP_SECONDS = 8.0
"""How long a child may take to end: the portal promises to within 5 s of SIGTERM."""


@dataclass
class Child:
    """One process. Without a log file it writes where its parent writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    reported: bool = False
    """Whether its end has been told."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def describe_end(self) -> str:
        """How it ended, with its last output."""
        text = f"{self.name} ended with status {self.process.returncode}"
        if self.log is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-10:]
            text = "\n    ".join([f"{text}; the end of {self.log}:", *lines])
        return text


@dataclass
class Supervisor:
    """Starts children and ends every one of them. `ask_to_stop` may be installed as a signal handler."""

    children: list[Child] = field(default_factory=list)
    stops_asked: int = 0

    def ask_to_stop(self, *_: object) -> None:
        """Only takes a note. The second time, children that still run are killed at once."""
        self.stops_asked += 1

    def spawn(self, name: str, command: Sequence[str], *, cwd: Path, log: Path | None = None) -> None:
        """Start one child, in a session of its own: Ctrl-C in a terminal then reaches the parent alone."""
        with ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            process = subprocess.Popen(
                [*dies_with_parent("TERM"), *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )
        self.children.append(Child(name, process, log))

    def newly_dead(self) -> list[Child]:
        """Children that have ended since the last call."""
        ended = [child for child in self.children if not child.running and not child.reported]
        for child in ended:
            child.reported = True
        return ended

    def stop(self) -> None:
        """End the children one after the other, the last started first."""
        for child in reversed(self.children):
            if child.running:
                child.process.terminate()
                self._wait(child)
                child.process.kill()
                child.process.wait()

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while child.running and time.monotonic() < deadline and self.stops_asked < 2:
            time.sleep(0.02)


@functools.cache
def dies_with_parent(signal_name: str) -> tuple[str, ...]:
    """A command prefix: the kernel sends this signal to the child when its parent dies, even by SIGKILL.

    Empty where util-linux's `setpriv` is missing. The signal comes when the starting *thread* ends, so
    children are to be started from the main thread.
    """
    prefix = ("setpriv", "--pdeathsig", signal_name, "--")
    if shutil.which("setpriv") is None:
        return ()
    works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if works else ()


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that were free on 127.0.0.1 a moment ago.

    Only for programs that cannot report a port the system chose: another process may take one meanwhile.
    """
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
