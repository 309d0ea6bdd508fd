"""The life of one stream as a pure machine: inputs with a time → what must be true now.

The machine owns no socket and no view. After each input its owner makes the world match three
attributes: `live` (which live connection there must be), `fetch` (which snapshot request must be under
way) and `serving` (whether a view may be seen by queries). Nothing is ever *scheduled*; `tick` acts on
what is due and `next_deadline` tells when that will be.

Faults come in two kinds. One that says that the view is no longer true (a gap, a decode error, a
disconnect, ...) ends serving at once: `fail`. One that only says that a snapshot could not be had:
`fetch_failed`; while a calibration of a true view fails, the stream goes on serving and shows a warning.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from streams.status import Fault, StreamState

FIRST_RETRY = 0.1
"""Seconds; the first retry comes within this time."""
LAST_RETRY = 5.0
"""Seconds; the longest wait between two retries."""
LASTING = 5.0
"""Seconds of service after which a success resets the backoff."""
GRACE = 5.0
"""Seconds after a snapshot in which an unknown block is explained by blocks that no snapshot lists."""
SOON = 1.0
"""Seconds within which a calibration that was brought forward starts."""
STRIKES = 3
"""Failures in a row caused by the live channel after which it is closed while waiting."""
MAX_SUSPECTS = 65_536
UNKNOWN_BLOCK = "unknown_block"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, from the configuration's milliseconds."""

    replay_timeout: float
    resync_interval: float


@dataclass(slots=True)
class Fetch:
    """One snapshot request."""

    number: int
    reason: str
    """A fault's code, or `start`, `calibration`, `unknown_block`, or who forced it."""
    requested_at: float
    deadline: float
    floor: int | None
    """Where the stream had arrived before the request: an answer below it is from another life."""
    watermark: int | None = None
    """Of the complete reply."""
    building: bool = False
    """The reply is complete; it is being turned into a view."""


class Lifecycle:
    """See the module's text. Times are monotonic seconds."""

    def __init__(self, timing: Timing, rng: random.Random) -> None:
        self._timing = timing
        self._rng = rng
        self.state = StreamState.CONNECTING
        self.error: Fault | None = None
        self.warning: Fault | None = None
        """A failed calibration of a view that still serves."""
        self.live: int | None = None
        """Number of the live connection that must be open; None: none."""
        self.fetch: Fetch | None = None
        self.serving = False
        self.same_life = False
        """Whether the next view may take over what earlier ones knew: the engine has not restarted."""
        self._connections = 0
        self._connected = False
        self._refused = False
        self._cause: Fault | None = None
        """Why there was no connection before the newest attempt to make one was refused."""
        self._received: int | None = None
        self._confirmed: int | None = None
        """Watermark of the last snapshot of this life."""
        self._fetches = 0
        self._attempt = 0
        self._calibration_attempt = 0
        self._strikes = 0
        self._retry_at = 0.0
        self._calibrate_at = 0.0
        self._next_reason = "start"
        self._again: str | None = None
        self._serving_since = 0.0
        self._grace_until = 0.0
        self._suspects: OrderedDict[int, None] = OrderedDict()

    # The live connection.

    def start(self, now: float) -> None:
        """Open the live connection for the first time; the first snapshot is jittered a little."""
        self._retry_at = now + self._rng.uniform(0.0, FIRST_RETRY)
        self._open_live()

    def live_up(self, now: float) -> None:
        """The live connection's handshake succeeded: a snapshot from now on misses nothing."""
        self._connected = True
        if self._refused:
            self.error, self._refused = self._cause, False
        self._received = self._confirmed = None
        self.state = StreamState.SYNCING
        self.tick(now)

    def live_down(self, fault: Fault, now: float) -> None:
        """The live connection is lost, or could not be made: nothing of that engine may be served."""
        if not self._connected:
            self._refuse(fault)
            return
        self._end_service(now)
        self._connected = False
        self.same_life = False
        self._received = None
        self.error = fault
        self._next_reason = fault.code
        self.state = StreamState.CONNECTING
        self._attempt += 1
        if self._attempt > 1:
            # An engine that hangs up again and again is not connected to again and again.
            self.live = None
            self._retry_at = now + self._backoff(self._attempt)
            return
        self._retry_at = now + self._rng.uniform(0.0, FIRST_RETRY)
        self._open_live()

    def unreachable(self, fault: Fault, now: float) -> None:
        """The connection is to be tried from the start: ZeroMQ gave up, or a name means another address."""
        if self._connected or self.live is None:
            return
        self._refuse(fault)
        self.state = StreamState.CONNECTING
        self.live = None
        self._attempt += 1
        self._retry_at = now + self._backoff(self._attempt)

    def receive(self, sequence: int) -> bool:
        """Note a message's sequence. False: it does not lie above the last one received."""
        forward = self._received is None or sequence > self._received
        self._received = sequence
        return forward

    # What goes wrong.

    def fail(self, fault: Fault, now: float, *, live_caused: bool = False, restarted: bool = False) -> None:
        """The view is not, or no longer, true. Ends serving and retries with backoff.

        `live_caused`: bad messages on the live channel, which is closed if that goes on.
        `restarted`: the engine began a new life.
        """
        if self.serving or self.fetch is not None:
            self._end_service(now)
            self._attempt += 1
            self._retry_at = now + self._backoff(self._attempt)
        # Otherwise a retry is due already, and what goes wrong until then must not put it off.
        self.error = fault
        self._next_reason = fault.code
        self.state = StreamState.UNSYNCHRONIZED
        if restarted:
            self.same_life = False
            self._confirmed = None
        self._strikes = self._strikes + 1 if live_caused else 0
        if self._strikes >= STRIKES:
            self._close_live()

    def crashed(self, fault: Fault, now: float) -> None:
        """Our own code failed: nothing that it left behind is relied on, so the connection is made anew."""
        self.fail(fault, now)
        self._close_live()

    def fetch_failed(self, fault: Fault, now: float) -> None:
        """The snapshot under way could not be had. A serving view is still true."""
        forced = self._again if self._again != UNKNOWN_BLOCK else None
        if not self.serving:
            self.fail(fault, now)
        else:
            self.fetch = self._again = None
            self.warning = fault
            self._calibration_attempt += 1
            self._calibrate_at = now + self._backoff(self._calibration_attempt)
        if forced is not None:
            # Somebody wanted one more snapshot than this, and at once.
            self._next_reason = forced
            self._retry_at = self._calibrate_at = now

    def is_orphan(self, block_hash: int, now: float, *, fresh: bool = False) -> bool:
        """Whether an unknown block of a live batch is to be an orphan; if not, the stream must recover.

        Blocks between leaving the Device and arriving on the Host are in no snapshot, so unknown
        blocks are expected for a while after one: a calibration is brought forward. Later they mean
        that something was missed. The same hash causes either only once. `fresh`: the view in
        question is newer than the one in service.
        """
        first = block_hash not in self._suspects
        if first:
            self._suspects[block_hash] = None
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        if now > self._grace_until and not fresh:
            return not first
        if first:
            self._calibrate_soon(UNKNOWN_BLOCK, now)
        return True

    # Snapshots.

    def accept(self, watermark: int, now: float) -> bool:
        """A reply is complete. False: it is from another life than the messages before it."""
        fetch = self.fetch
        if fetch is None:
            return False
        if fetch.floor is not None and watermark < fetch.floor:
            sentence = (
                f"the snapshot's watermark {watermark} lies below {fetch.floor}, "
                "where the stream had arrived before it was requested: the engine counts anew"
            )
            self._received = None
            self.fail(Fault("snapshot_stale", sentence), now, restarted=True)
            return False
        fetch.watermark = watermark
        fetch.building = True
        return True

    def published(self, now: float) -> None:
        """A new view, or the old one confirmed by an unchanged snapshot, is in service."""
        if self.fetch is not None:
            self._confirmed = self.fetch.watermark
        self._enter_service(now)

    def redefined(self, now: float) -> None:
        """A live batch defined the whole state; whatever snapshot is under way is older."""
        self._confirmed = None
        self._enter_service(now)

    def resync(self, reason: str, now: float, *, drop: bool = False) -> None:
        """A person or an API wants a fresh snapshot now; with `drop`, the old view stops serving first."""
        if drop:
            if self.serving:
                self._end_service(now)
                self.error = Fault("resync_forced", "dropped on request; a fresh snapshot is on its way")
                self.state = StreamState.UNSYNCHRONIZED
            self._attempt = 0
            self.fetch = None
        if self.fetch is not None:
            self._again = reason
        self._next_reason = reason
        self._retry_at = self._calibrate_at = now
        self.tick(now)

    # Time.

    def tick(self, now: float) -> None:
        """Do what is due."""
        fetch = self.fetch
        if fetch is not None and not fetch.building and now >= fetch.deadline:
            waited = self._timing.replay_timeout
            sentence = f"no complete snapshot within {waited * 1000:.0f} ms (replay_timeout_ms)"
            self.fetch_failed(Fault("snapshot_timeout", sentence), now)
        if self.live is None and self._connections and now >= self._retry_at:
            self.state = StreamState.CONNECTING
            self._open_live()
        if self._connected and self.fetch is None and now >= self._due_at:
            self._begin_fetch(now)

    def next_deadline(self) -> float | None:
        """When `tick` has to be called next; None: nothing is due before the next input."""
        if self.fetch is not None:
            return None if self.fetch.building else self.fetch.deadline
        if self._connected or self.live is None:
            return self._due_at
        return None

    @property
    def _due_at(self) -> float:
        return self._calibrate_at if self.serving else self._retry_at

    def _open_live(self) -> None:
        self._connections += 1
        self.live = self._connections

    def _close_live(self) -> None:
        """Until the next retry."""
        self.live = None
        self._connected = False
        self.same_life = False

    def _refuse(self, fault: Fault) -> None:
        """There is no connection: shown as the reason until there is one."""
        if not self._refused:
            self._cause, self._refused = self.error, True
        self.error = fault

    def _begin_fetch(self, now: float) -> None:
        self._fetches += 1
        deadline = now + self._timing.replay_timeout
        arrived = [sequence for sequence in (self._received, self._confirmed) if sequence is not None]
        floor = max(arrived, default=None)
        self.fetch = Fetch(self._fetches, self._next_reason, now, deadline, floor)
        self._next_reason = "calibration"
        if not self.serving:
            self.state = StreamState.SYNCING

    def _enter_service(self, now: float) -> None:
        self.fetch = None
        self.error = self.warning = None
        self.state = StreamState.SYNCHRONIZED
        if not self.serving:
            self._serving_since = now
        self.serving = self.same_life = True
        self._calibration_attempt = 0
        self._grace_until = now + GRACE
        self._calibrate_at = now + self._timing.resync_interval * self._rng.uniform(0.9, 1.0)
        self._next_reason = "calibration"
        again, self._again = self._again, None
        if again is not None:
            self._calibrate_soon(again, now)

    def _end_service(self, now: float) -> None:
        if self.serving and now - self._serving_since > LASTING:
            self._attempt = self._strikes = 0
        self.serving = False
        self.fetch = None
        self.warning = None
        self._again = None

    def _calibrate_soon(self, reason: str, now: float) -> None:
        if self.fetch is not None:
            self._again = reason
            return
        self._next_reason = reason
        self._calibrate_at = min(self._calibrate_at, now + self._rng.uniform(0.0, SOON))

    def _backoff(self, attempt: int) -> float:
        longest = min(LAST_RETRY, FIRST_RETRY * 2.0 ** min(attempt - 1, 16))
        return self._rng.uniform(longest / 2, longest)
