"""Orders from people, carried out on every replica.

An order to resynchronise streams becomes a database row (the audit, and what a replica finds when a
message got lost) and a message on the channel layer (the nudge, which carries the whole order so that
it works without a database). Each replica runs a worker that receives the messages on the server's
event loop; it carries an order out once, however it heard of it, watches what becomes of the streams
and records the outcome.

Lifetime: `Commands(directory, history)` before `history.start()`, because it adds chores to it;
`attach(loop)` once the server's event loop exists; `detach()` before that loop is closed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from channels.layers import get_channel_layer

from kvportal import records
from kvportal.history import History
from streams.resync import OutcomeState, ResyncOrder, ResyncOutcome, is_settled, matching
from streams.spec import StreamId
from streams.status import StreamState, StreamStatus
from streams.wording import counted

log = logging.getLogger(__name__)

GROUP = "kvportal.replicas"
CHANNEL_PREFIX = "kvportal.replica"
MESSAGE_TYPE = "resync.ordered"
REJOIN_SECONDS = 3600.0
"""Channel layers forget the members of a group after a day."""
NUDGE_SECONDS = 2.0
"""An order that has not come back over the channel layer by then is carried out without it."""
POLL_SECONDS = 5.0
FOLLOW_SECONDS = 0.5
SETTLE_SECONDS = 20.0
"""How long an order's streams are watched for their new snapshot."""
REMEMBERED = 1000
RESTART_SECONDS = (0.5, 30.0)
"""First and longest pause before the worker starts again."""


class Resyncer(Protocol):
    """The part of the directory that orders need."""

    def statuses(self) -> tuple[StreamStatus, ...]: ...

    def resync(
        self, *, instance_name: str | None = None, dp_rank: int | None = None, drop: bool = False
    ) -> tuple[StreamId, ...]: ...


@dataclass(frozen=True, slots=True)
class _Followed:
    order: ResyncOrder
    streams: tuple[StreamId, ...]
    since: float
    """Wall clock at which the streams were told."""


class Commands:
    """Takes orders on any thread and sees to it that each is carried out once on this replica."""

    def __init__(
        self,
        directory: Resyncer,
        history: History,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._history = history
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._carried_out: OrderedDict[str, None] = OrderedDict()
        self._placed: dict[str, tuple[ResyncOrder, float]] = {}
        self._followed: list[_Followed] = []
        self._after_id: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Future[None] | None = None
        self.worker_error: str | None = None
        """Why the worker is not receiving, None while it is; shown on the page."""
        history.add_chore("orders in the database", POLL_SECONDS, self.poll)
        history.add_chore("outcomes of orders", FOLLOW_SECONDS, self.follow)

    # ---- any thread

    def order(self, order: ResyncOrder) -> int:
        """Pass an order on to every replica, this one included; how many streams here it concerns.

        Returns at once: neither the database nor the channel layer is waited for.
        """
        self._history.record_order(order)
        with self._lock:
            self._placed[order.key] = (order, self._monotonic() + NUDGE_SECONDS)
        concerned = matching(order.targets, (status.spec.id for status in self._directory.statuses()))
        if not self._nudge(order):
            self.carry_out(order)
        return len(concerned)

    def carry_out(self, order: ResyncOrder) -> None:
        """Tell this replica's streams, unless it has been done; only posts to them."""
        with self._lock:
            self._placed.pop(order.key, None)
            if order.key in self._carried_out:
                return
            self._carried_out[order.key] = None
            while len(self._carried_out) > REMEMBERED:
                self._carried_out.popitem(last=False)
        now = self._clock()
        try:
            reached = self._tell(order)
        except Exception as error:
            log.exception("a resync ordered by %s failed", order.actor)
            self._report(order, OutcomeState.FAILED, 0, 0, f"{type(error).__name__}: {error}")
            return
        told = counted(len(reached), "stream")
        log.info("resync of %s ordered by %s: %s reached", order.scope, order.actor, told)
        if not reached:
            self._report(order, OutcomeState.NO_MATCH, 0, 0, "This replica follows no such stream.")
            return
        self._report(order, OutcomeState.STARTED, len(reached), 0, "Waiting for new snapshots.")
        with self._lock:
            self._followed.append(_Followed(order, reached, now))

    def _tell(self, order: ResyncOrder) -> tuple[StreamId, ...]:
        streams = matching(order.targets, (status.spec.id for status in self._directory.statuses()))
        reached: list[StreamId] = []
        for stream in streams:
            reached += self._directory.resync(
                instance_name=stream.instance_name, dp_rank=stream.dp_rank, drop=order.drop
            )
        return tuple(reached)

    def _report(
        self, order: ResyncOrder, state: OutcomeState, reached: int, settled: int, detail: str
    ) -> None:
        self._history.record_outcome(
            ResyncOutcome(order, self._history.replica, self._clock(), state, reached, settled, detail)
        )

    # ---- chores, on the history's thread

    def poll(self, now: float) -> None:
        """Carry out what the database holds and no message brought. What was ordered before this
        process started is not for it: its streams were synchronised since."""
        if self._after_id is None:
            self._after_id = records.latest_order_id()
            return
        for order in records.open_orders(self._history.replica, self._after_id, now):
            self.carry_out(order)

    def follow(self, now: float) -> None:
        """Carry out orders whose nudge got lost; report what became of the streams of the others."""
        with self._lock:
            overdue = [order for order, due in self._placed.values() if self._monotonic() >= due]
            followed, self._followed = self._followed, []
        for order in overdue:
            self._without_message(order)
        if not followed:
            return
        statuses = {status.spec.id: status for status in self._directory.statuses()}
        waiting = [item for item in followed if not self._conclude(item, statuses, now)]
        with self._lock:
            self._followed = waiting + self._followed

    def _conclude(self, item: _Followed, statuses: dict[StreamId, StreamStatus], now: float) -> bool:
        outcome = judge(item.streams, statuses, item.since, now)
        if outcome is None:
            return False
        state, settled, detail = outcome
        self._report(item.order, state, len(item.streams), settled, detail)
        return True

    # ---- the server's event loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the worker on the server's loop. Callable from any thread."""
        self._loop = loop
        self._worker = asyncio.run_coroutine_threadsafe(self._supervise(), loop)

    def detach(self) -> None:
        """End the worker; orders are carried out without the channel layer from now on."""
        self._loop = None
        if self._worker is not None:
            self._worker.cancel()

    def _nudge(self, order: ResyncOrder) -> bool:
        loop = self._loop
        if loop is None or self.worker_error is not None:
            return False
        try:
            asyncio.run_coroutine_threadsafe(self._send(order), loop)
        except RuntimeError:  # the loop was closed in between
            return False
        return True

    async def _send(self, order: ResyncOrder) -> None:
        """Also sees to it that this replica carries the order out in time, whatever becomes of the message:
        the history's thread, which does the same, may be waiting for the database."""
        asyncio.get_running_loop().call_later(NUDGE_SECONDS, self._without_message, order)
        try:
            await get_channel_layer().group_send(GROUP, {"type": MESSAGE_TYPE, "order": order.to_message()})
        except Exception:
            log.exception(
                "the channel layer did not take an order; other replicas will find it in the database"
            )
            self.carry_out(order)

    def _without_message(self, order: ResyncOrder) -> None:
        """Carry out an order whose message has had its time, if it has not come."""
        with self._lock:
            lost = order.key in self._placed
        if lost:
            log.warning("the channel layer lost an order, which is carried out without it")
            self.carry_out(order)

    async def _supervise(self) -> None:
        first, longest = RESTART_SECONDS
        pause = first
        while True:
            started = self._monotonic()
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - the worker outlives whatever happens to it
                self._failed(f"{type(error).__name__}: {error}")
            pause = first if self._monotonic() - started > longest else min(longest, pause * 2)
            await asyncio.sleep(pause)

    def _failed(self, reason: str) -> None:
        """Said once for each reason, however often the worker tries again."""
        if reason != self.worker_error:
            log.warning(
                "the channel layer (KVPORTAL_REDIS_URL) fails, orders travel through the database: %s", reason
            )
        self.worker_error = reason

    def _joined(self) -> None:
        if self.worker_error is not None:
            log.info("the channel layer works again")
        self.worker_error = None

    async def _work(self) -> None:
        """Receive this replica's messages, joining the group again every hour."""
        layer = get_channel_layer()
        channel = await layer.new_channel(CHANNEL_PREFIX)
        try:
            while True:
                await layer.group_add(GROUP, channel)
                self._joined()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REJOIN_SECONDS):
                        while True:
                            self.receive(await layer.receive(channel))
        finally:
            with suppress(Exception):
                await asyncio.wait_for(layer.group_discard(GROUP, channel), 1.0)

    def receive(self, message: dict[str, Any]) -> None:
        """Act on one message. One that this version does not understand is logged, not obeyed."""
        try:
            if message["type"] != MESSAGE_TYPE:
                raise ValueError(f"unknown type {message['type']!r}")
            order = ResyncOrder.from_message(message["order"])
        except (KeyError, TypeError, ValueError) as error:
            log.warning("a message from another replica is not understood: %s", error)
            return
        self.carry_out(order)


def judge(
    streams: tuple[StreamId, ...], statuses: dict[StreamId, StreamStatus], since: float, now: float
) -> tuple[OutcomeState, int, str] | None:
    """What became of streams that were told to resynchronise at `since`: state, how many have a new
    snapshot, a sentence. None: it is too early to say."""
    here = [statuses[stream] for stream in streams if stream in statuses]
    open_ones = [status for status in here if not is_settled(status, since)]
    settled = len(here) - len(open_ones)
    if open_ones and now - since < SETTLE_SECONDS:
        return None
    retired = len(streams) - len(here)
    have = "has" if 1 in (settled, len(streams)) else "have"
    told = f"{settled} of {counted(len(streams), 'stream')} {have} a new snapshot after {now - since:.1f} s"
    if retired:
        told += f", {retired} left the directory meanwhile"
    if not open_ones:
        return OutcomeState.DONE, settled, f"{told}."
    first = open_ones[0]
    why = str(first.error or first.warning or f"still {first.state}")
    if first.state is StreamState.SYNCHRONIZED and first.error is None and first.warning is None:
        why = "it still serves its old snapshot"
    return OutcomeState.INCOMPLETE, settled, f"{told}. {first.spec.id}: {why}"
