"""The parts of `serve` that can be told apart from a running process."""

from __future__ import annotations

import resource
import signal
import socket
import sys

import pytest

from kvportal import process
from kvportal.origin import is_own_origin
from kvportal.process import ProcessError, prepare_process
from kvportal.server import uvicorn_server
from kvportal.server.listening import ListenError, listen, listening_url
from kvportal.server.stopping import StopRequest
from kvportal.server.uvicorn_server import UvicornMissingError, require_uvicorn


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://portal.example:8888", "portal.example:8888", True),
        ("https://Portal.example", "portal.EXAMPLE", True),
        ("https://public.example", "10.0.0.7:8888", True),
        ("https://public.example:444", "10.0.0.7:8888", False),
        ("http://portal.example:8889", "portal.example:8888", False),
        ("http://portal.example.evil.example", "portal.example", False),
        ("null", "portal.example", False),
        ("", "portal.example", False),
        ("", "", False),
        ("http://[", "portal.example", False),
    ],
)
def test_whose_pages_may_open_a_websocket(origin, host, own):
    assert is_own_origin(origin, host, ["https://public.example"]) is own


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_listening_takes_connections_at_the_address_it_tells(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        address = listener.getsockname()
        assert listening_url(listener) in (f"http://127.0.0.1:{address[1]}", f"http://[::1]:{address[1]}")
        socket.create_connection(address[:2], timeout=5).close()


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.1", "this machine has no such address; choose another --server-host"),
        ("no-such-host.invalid", "the name does not resolve"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_explained(host, sentence):
    with pytest.raises(ListenError, match=sentence):
        listen(host, 0)


def test_a_missing_uvicorn_is_explained(monkeypatch):
    monkeypatch.setattr(uvicorn_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UvicornMissingError, match=r"pip install 'kvportal\[uvicorn\]'"):
        require_uvicorn()


class Interrupted(StopRequest):
    """The signal comes between two steps of `on_request`."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_callback" and value is not None:
            self._handle(signal.SIGTERM, None)


def test_a_stop_is_told_once_whenever_the_signal_comes():
    told = []
    stop: StopRequest = Interrupted(60)
    stop.on_request(lambda: told.append("at the same time"))
    stop._watchdog.cancel()
    assert told == ["at the same time"]

    stop = StopRequest(60)
    stop._handle(signal.SIGTERM, None)
    stop._watchdog.cancel()
    stop.on_request(lambda: told.append("before"))
    stop._handle(signal.SIGTERM, None)
    assert told[1:] == ["before"]

    stop = StopRequest(60)
    stop.on_request(lambda: told.append("after"))
    stop._handle(signal.SIGTERM, None)
    stop._handle(signal.SIGTERM, None)
    stop._watchdog.cancel()
    assert told[2:] == ["after"]


@pytest.fixture
def restored():
    """The process as it was."""
    limits, interval = resource.getrlimit(resource.RLIMIT_NOFILE), sys.getswitchinterval()
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sys.setswitchinterval(interval)


def test_the_soft_limit_of_files_is_raised_and_the_switch_interval_set(restored):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, restored[1]))
    prepare_process(max_streams=2)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 2 * process.FILES_PER_STREAM + process.OTHER_FILES
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_too_few_files_for_all_streams_are_explained(restored, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    with pytest.raises(ProcessError, match=r"may open 256 files \(hard limit\) and needs 2560"):
        prepare_process(max_streams=128)


def test_too_few_zeromq_sockets_are_explained(restored, monkeypatch):
    monkeypatch.setattr(process, "SOCKETS_PER_STREAM", 10**6)
    with pytest.raises(ProcessError, match="lower max_streams"):
        prepare_process(max_streams=128)
