"""What the process needs from the interpreter and the system, set and checked once at the start."""

from __future__ import annotations

import resource
import sys

import zmq

from streams.wording import counted

SWITCH_INTERVAL_SECONDS = 0.0005
"""A stream's thread gives the interpreter lock back so briefly that a waiting query rarely gets it; at
the default of 5 ms one busy stream makes queries wait for hundreds of milliseconds."""
FILES_PER_STREAM = 12
"""Descriptors of one subscriber: two TCP connections (for moments more, around a reconnection) and the
pipes of its sockets and monitors, generously."""
SOCKETS_PER_STREAM = 8
"""ZeroMQ sockets of one subscriber: SUB, DEALER, a monitor for each (two sockets), control."""
OTHER_FILES = 1024
"""HTTP and WebSocket connections, databases, logs."""


class ProcessError(Exception):
    """The system does not let the process have what it needs; the sentence says what to change."""


def prepare_process(max_streams: int) -> None:
    """Sets the switch interval; raises the soft limit of open files, and checks ZeroMQ's own limit.

    Raises ProcessError when `max_streams` streams cannot all be followed.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _raise_file_limit(max_streams * FILES_PER_STREAM + OTHER_FILES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        limit = int(context.get(zmq.SOCKET_LIMIT))
    finally:
        context.term()
    if limit < max_streams * SOCKETS_PER_STREAM:
        raise ProcessError(
            f"ZeroMQ on this machine allows {limit} sockets; {counted(max_streams, 'stream')} would need "
            f"{max_streams * SOCKETS_PER_STREAM}: lower max_streams in the KV events file"
        )


def _raise_file_limit(needed: int) -> None:
    """Takes as many files as the hard limit allows; they cost nothing until they are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ProcessError(
            f"the process may open {hard} files (hard limit) and needs {needed}: raise it "
            "(ulimit -Hn, LimitNOFILE= in systemd, ulimits in compose), or lower max_streams"
        )
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, needed)
    # Beyond a million nothing is gained, and some programs walk through all possible descriptors.
    wanted = max(needed, min(wanted, 1_048_576))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
