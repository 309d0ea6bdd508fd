"""A watch over a range of keys that loses nothing.

The keys are listed once, in the order in which they were created, and watched from the next revision
on. Whatever breaks is repaired by watching again from the last revision that was handled. When that
is no longer possible (its history was compacted, the store was replaced, the watch is mute), the
keys are listed again and the difference to what was known is handed on: first what was written, then
what is gone.

Two threads. One lists and watches, and owns all that is known. The other only asks a small question
every few seconds: that is how a server that is frozen, and a connection that nobody will ever write
to again, are told from a quiet one.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from routing.instances.etcd import EtcdClient, EtcdSettings, WatchStream
from routing.instances.etcd_wire import EtcdError, EtcdHistoryError, KeyValue, Page
from routing.instances.keys import KeyEvent, KeyRange

log = logging.getLogger(__name__)

_PAGE_KEYS: Final = 40
"""Keys listed at once: even if each has the longest value that etcd takes, the answer fits."""
_MIN_BACKOFF: Final = 0.1
_NO_ANSWER_YET: Final = "no answer yet"
_NEWS_SECONDS: Final = 60.0
"""While etcd is away, another reason is logged this long after the one before at the earliest."""


class Handler(Protocol):
    """Takes what happened, on the watching thread, each revision once and in order."""

    def __call__(self, events: Sequence[KeyEvent], *, listed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class WatchState:
    """Where a watch stands."""

    connected: bool
    since: float
    """Wall clock of the last change of `connected`."""
    error: str | None
    endpoint: str
    revision: int
    relists: int
    reconnects: int


class Doubt(NamedTuple):
    """Why a watch looks broken. It may as well be late, and then the mark changes."""

    reason: str
    mark: int
    since: float
    """Monotonic seconds."""


class RangeWatcher:
    """Keeps a handler up to date with a range of keys until it is stopped."""

    def __init__(
        self,
        settings: EtcdSettings,
        keys: KeyRange,
        handler: Handler,
        *,
        on_state: Callable[[], None] = lambda: None,
        seed: int | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._handler = handler
        self._on_state = on_state
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._retry_now = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_loop, name="etcd-watch", daemon=True),
            threading.Thread(target=self._heartbeat_loop, name="etcd-heartbeat", daemon=True),
        ]
        self._client = EtcdClient(settings)
        self._heartbeat_client = EtcdClient(settings)
        # Owned by the watching thread; the heartbeat only reads them, and posts `_relist`.
        self._known: dict[bytes, int] = {}
        self._revision = 0
        self._cluster_id = ""
        self._progress = 0
        self._relist: str | None = "nothing is known yet"
        self._stream: WatchStream | None = None
        self._was_up = False
        self._broken = ""
        """Why the heartbeat ended the watch."""
        # Two independent facts make up the state; the lock keeps their combination consistent.
        self._state_lock = threading.Lock()
        self._watching = False
        self._heartbeat_error: str | None = None
        self._state = WatchState(False, time.time(), _NO_ANSWER_YET, self._client.endpoint, 0, 0, 0)
        self._logged: WatchState | None = None
        self._logged_at = -_NEWS_SECONDS

    @property
    def state(self) -> WatchState:
        return self._state

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """End both threads; their sockets are closed by them."""
        self._stop.set()
        self._retry_now.set()
        for client in (self._client, self._heartbeat_client):
            client.abort()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    # ---- the watching thread

    def _watch_loop(self) -> None:
        failures = 0
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                error = self._session()
                lasted = time.monotonic() - started > self._settings.max_backoff
                failures = 1 if lasted else failures + 1
                if not self._stop.is_set():
                    self._lost(error)
                    self._pause(failures)
        finally:
            self._client.close()

    def _pause(self, failures: int) -> None:
        """Wait before the next attempt: longer from failure to failure, never in step with others."""
        limit = min(self._settings.max_backoff, _MIN_BACKOFF * 2 ** min(failures, 16))
        self._retry_now.wait(limit * self._random.uniform(0.5, 1.0))
        self._retry_now.clear()

    def _session(self) -> Exception:
        """List if that is needed, watch until something breaks, and return what."""
        try:
            self._prepare()
            self._stream = self._client.watch(self._keys, self._revision + 1)
            self._up()
            self._follow(self._stream)
            return EtcdError("the watch ended")
        except EtcdHistoryError as error:
            self._relist = str(error)
            return error
        except (OSError, http.client.HTTPException, EtcdError) as error:
            self._client.forget_token()
            return error
        except Exception as error:
            # Not a fault of the network: the handler's, or an answer that makes no sense. What was
            # half handled is repaired by handling everything again.
            log.exception("following etcd failed; its keys will be listed again")
            self._forget()
            self._relist = f"an error in following it: {error}"
            return error
        finally:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()

    def _prepare(self) -> None:
        """Everything is known up to `_revision` when this returns, and can be watched from there."""
        if self._relist is None and not self._is_as_remembered():
            self._forget()
            self._relist = "the store was replaced"
        if self._relist is not None:
            self._list()

    def _is_as_remembered(self) -> bool:
        """Whether the store tells of `_revision` what was seen of it. One that was restored from a backup
        may have passed that revision meanwhile, with other keys.

        Raises `EtcdHistoryError` when it cannot tell. A watch could begin at the revision that was
        compacted to, but old versions of etcd have thrown away what was deleted at it.
        """
        then = self._client.range(
            self._keys, limit=1, keys_only=True, newest_first=True, revision=self._revision
        )
        return (
            not self._is_replaced(then, self._revision)
            and then.count == len(self._known)
            and all(self._known.get(kv.key) == kv.mod_revision for kv in then.kvs)
        )

    def _is_replaced(self, page: Page, seen: int) -> bool:
        """A store that is behind the revision seen before it was asked, or another one, has no future
        that fits our past."""
        return page.cluster_id != self._cluster_id or page.revision < seen

    def _list(self) -> None:
        reason = self._relist
        pages = list(self._pages())
        first = pages[0]
        if self._is_replaced(first, self._revision):
            self._forget()
        kvs = sorted((kv for page in pages for kv in page.kvs), key=lambda kv: kv.create_revision)
        self._handle(list(_difference(self._known, kvs, first.revision)), listed=True)
        self._known = {kv.key: kv.mod_revision for kv in kvs}
        if self._cluster_id:
            log.warning("etcd's keys were listed again: %s", reason)
            self._count(relists=1)
        self._cluster_id, self._revision, self._relist = first.cluster_id, first.revision, None

    def _forget(self) -> None:
        """What is known of the keys' revisions is worth nothing any more; that they were there is."""
        self._known = dict.fromkeys(self._known, 0)

    def _pages(self) -> Iterable[Page]:
        """All keys as of one revision."""
        page = self._client.range(self._keys, limit=_PAGE_KEYS)
        revision = page.revision
        yield page
        while page.more and page.kvs:
            rest = KeyRange(page.kvs[-1].key + b"\0", self._keys.end)
            page = self._client.range(rest, limit=_PAGE_KEYS, revision=revision)
            yield page

    def _follow(self, stream: WatchStream) -> None:
        pending: list[KeyEvent] = []
        for answer in stream:
            pending += answer.events
            # The pieces of a large answer may cut through a revision, so that one could not be
            # resumed in between.
            if answer.partial:
                continue
            if pending:
                self._handle(pending, listed=False)
                for event in pending:
                    self._learn(event)
                self._revision = max(self._revision, pending[-1].mod_revision)
                pending = []
            elif not answer.events:
                # A progress notification: nothing up to there is still to come. (With events, the
                # store's revision may be ahead of what was sent.)
                self._revision = max(self._revision, answer.revision)
            self._set()

    def _learn(self, event: KeyEvent) -> None:
        if event.value is None:
            self._known.pop(event.key, None)
        else:
            self._known[event.key] = event.mod_revision

    def _handle(self, events: list[KeyEvent], *, listed: bool) -> None:
        if events:
            self._handler(events, listed=listed)
        self._progress += 1

    # ---- the heartbeat thread

    def _heartbeat_loop(self) -> None:
        doubt: Doubt | None = None
        try:
            while not self._stop.wait(self._settings.heartbeat_interval):
                seen = self._revision
                try:
                    page = self._beat()
                except (OSError, http.client.HTTPException, EtcdError) as error:
                    self._heartbeat_client.forget_token()
                    if not self._stop.is_set():
                        self._set(heartbeat_error=str(error))
                        self._break("etcd does not answer")
                except Exception:
                    log.exception("etcd's answer to a heartbeat makes no sense")
                else:
                    doubt = self._judge(page, seen, doubt)
        finally:
            self._heartbeat_client.close()

    def _beat(self) -> Page:
        client = self._heartbeat_client
        endpoint = client.endpoint
        page = client.range(self._keys, limit=1, keys_only=True, newest_first=True)
        if client.endpoint != endpoint:
            self._break(f"{endpoint} does not answer")
        if self._heartbeat_error is not None:
            self._set(heartbeat_error="")
            self._retry_now.set()
        return page

    def _judge(self, page: Page, seen: int, doubt: Doubt | None) -> Doubt | None:
        """Compare the store with what the watch has brought (`seen`: before the store was asked). A doubt
        that stays the same for as long as an answer may take is true. Returns the doubt that there is."""
        if self._stream is None:
            return None
        if self._is_replaced(page, seen):
            self._relist = "the store was replaced"
        else:
            now = self._doubt(page)
            if now is None or doubt is None or now[:2] != doubt[:2]:
                return now
            if now.since - doubt.since < self._settings.request_timeout:
                return doubt
            self._relist = now.reason
        self._break(self._relist)
        return None

    def _doubt(self, page: Page) -> Doubt | None:
        """A watch that is behind should move. One that is not should know of as many keys as there are:
        it may move all the time and never learn of a deletion that was lost."""
        now = time.monotonic()
        if page.kvs and page.kvs[0].mod_revision > self._revision:
            return Doubt("the watch was mute", self._progress, now)
        missing = page.count - len(self._known)
        return Doubt("the watch has lost a change", missing, now) if missing else None

    def _break(self, reason: str) -> None:
        """End the watch that is open, if one is; its thread opens another."""
        stream = self._stream
        if stream is not None:
            self._broken = reason
            stream.interrupt()

    # ---- state

    def _up(self) -> None:
        self._progress += 1
        if self._was_up:
            self._count(reconnects=1)
        self._was_up = True
        self._set(watching=True)

    def _lost(self, error: Exception) -> None:
        reason, self._broken = self._broken, ""
        self._set(watching=False, error=reason or str(error) or type(error).__name__)

    def _count(self, *, relists: int = 0, reconnects: int = 0) -> None:
        with self._state_lock:
            self._state = replace(
                self._state,
                relists=self._state.relists + relists,
                reconnects=self._state.reconnects + reconnects,
            )

    def _set(
        self, *, watching: bool | None = None, error: str | None = None, heartbeat_error: str | None = None
    ) -> None:
        """Note what changed. An empty `heartbeat_error`: heartbeats are answered again."""
        with self._state_lock:
            before = self._state
            if watching is not None:
                self._watching = watching
            if heartbeat_error is not None:
                self._heartbeat_error = heartbeat_error or None
            connected = self._watching and self._heartbeat_error is None
            self._state = replace(
                before,
                connected=connected,
                since=before.since if connected == before.connected else time.time(),
                error=None if connected else self._heartbeat_error or error or before.error,
                endpoint=self._client.endpoint,
                revision=self._revision,
            )
            state, news = self._state, self._is_news(self._state)
            if news:
                self._logged, self._logged_at = state, time.monotonic()
        if news:
            self._log(state)
        if connected != before.connected:
            self._on_state()

    def _is_news(self, state: WatchState) -> bool:
        """Every change is, the first failure is, and while it lasts another reason is now and then."""
        logged = self._logged
        if state.connected or state.error == _NO_ANSWER_YET:
            return state.connected and (logged is None or not logged.connected)
        if logged is None or logged.connected:
            return True
        return state.error != logged.error and time.monotonic() - self._logged_at >= _NEWS_SECONDS

    def _log(self, state: WatchState) -> None:
        if state.connected:
            log.info("etcd at %s is followed from revision %d", state.endpoint, state.revision)
        elif self._cluster_id:
            log.warning("etcd is not followed now, what is known stays: %s", state.error)
        else:
            log.warning("etcd is not connected, no instance is known yet: %s", state.error)


def _difference(known: dict[bytes, int], now: Sequence[KeyValue], revision: int) -> Iterable[KeyEvent]:
    """What a listing says beyond what was known (key → mod_revision): writes in order of creation,
    then what is gone. (In this order, since an instance may have moved from one key to another.)"""
    for kv in now:
        if known.get(kv.key) != kv.mod_revision:
            yield KeyEvent(kv.key, kv.value, kv.mod_revision, kv.create_revision)
    present = {kv.key for kv in now}
    for key in known:
        if key not in present:
            yield KeyEvent(key, None, revision)
