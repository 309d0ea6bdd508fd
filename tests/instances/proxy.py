"""A TCP proxy in front of a server, to cut a client off while the server goes on for everybody else."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from typing import Self


class Link:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.sent = b""
        """The first bytes that the client sent."""
        self.stalled = False

    def close(self) -> None:
        for side in (self.client, self.server):
            side.close()


class Proxy:
    """Forwards to `port` on 127.0.0.1 until told otherwise. One thread owns all sockets; tests post."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._orders: list[str] = []
        self._links: set[Link] = set()
        self._refusing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def cut(self) -> None:
        """Break every connection, and every new one."""
        self._order("cut")

    def mend(self) -> None:
        """Forward new connections again."""
        self._order("mend")

    def stall_watches(self) -> None:
        """Keep the watches that are open, and never again forward anything on them."""
        self._order("stall")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._order("end")
        self._thread.join(5)
        self._wake.close()

    def _order(self, order: str) -> None:
        done = threading.Event()
        self._orders.append(order)
        with suppress(OSError):  # it may have seen the order already, and ended
            self._wake.send(b"x")
        while self._orders and not self._ended:
            done.wait(0.001)

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        while not self._ended:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(100)
                elif key.data in self._links:
                    self._forward(key.data, key.fileobj)
            for order in list(self._orders):
                self._obey(order)
                self._orders.remove(order)
        self._listener.close()
        self._woken.close()
        self._selector.close()

    def _obey(self, order: str) -> None:
        if order in ("cut", "end"):
            for link in list(self._links):
                self._drop(link)
        if order == "stall":
            for link in self._links:
                link.stalled = b"/v3/watch" in link.sent
        self._refusing = order == "cut" or (self._refusing and order != "mend")
        self._ended = order == "end"

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._refusing:
            client.close()
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 1)
        except OSError:
            client.close()
            return
        link = Link(client, server)
        self._links.add(link)
        for side in (client, server):
            self._selector.register(side, selectors.EVENT_READ, link)

    def _forward(self, link: Link, source: object) -> None:
        origin, target = (link.client, link.server) if source is link.client else (link.server, link.client)
        data = b""
        with suppress(OSError):
            data = origin.recv(65536)
        if source is link.client and len(link.sent) < 1000:
            link.sent += data
        if link.stalled and data:
            return
        try:
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        for side in (link.client, link.server):
            self._selector.unregister(side)
        link.close()
