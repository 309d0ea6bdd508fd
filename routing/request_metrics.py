"""Counts, per instance, the requests that were sent there and are still under way.

A decision opens a request (SCHEDULE); the gateway reports how it goes on (FINISH_PREFILL, GENERATE,
FINISH_DECODE, CANCEL); a request that nobody reports on any more expires and is undone. What a
request added is remembered with it, and exactly that is taken off again, so that the counters never
leak and never fall below zero:

    SCHEDULE        prefill instance: +1 request, +prompt tokens, +estimate;  decode instance: +1, +prompt
    FINISH_PREFILL  prefill instance: all of that off;                        decode instance: +1 token
    GENERATE        decode instance: +1 token, or exactly the total that it comes with
    FINISH_DECODE, CANCEL, expiry                                             everything left off

A request without a decode instance is decoded where it was prefilled. Reports may come twice or out
of order: what was done is not done again, and a FINISH_PREFILL that comes after a total has nothing to
add to it: whoever counts tokens has counted the first one, too.

Counters belong to one life of an instance (its `order` in the registry). Those of a life that is
over are dropped; requests still hold on to them, so that what ends later touches no successor.

Not thread-safe: one owner calls it, under a lock, and passes the time in (monotonic seconds).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

EXPIRY_SECONDS: Final = 600.0
MAX_OPEN: Final = 200_000
"""Requests under way at most; beyond it the one without news for longest expires early."""
MAX_CLOSED: Final = 100_000
"""Ended requests that are remembered, so that a repeated report is recognised as such."""


class Action(StrEnum):
    """What a gateway can report. SCHEDULE is implied by the decision: reported, it repeats it."""

    SCHEDULE = "SCHEDULE"
    FINISH_PREFILL = "FINISH_PREFILL"
    GENERATE = "GENERATE"
    FINISH_DECODE = "FINISH_DECODE"
    CANCEL = "CANCEL"


class UnknownRequestError(LookupError):
    """No such request: never decided here, or expired."""


class RequestOpenError(ValueError):
    """The request is still under way and cannot be opened again."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What is under way on one instance, at one moment."""

    prefill_request_num: int = 0
    prefill_token_num: int = 0
    decode_request_num: int = 0
    decode_token_num: int = 0
    estimated_prefill_time: float = 0.0
    """Milliseconds."""


@dataclass(slots=True)
class _Life:
    """Counters of one life of an instance. Times in whole microseconds: sums of floats would not
    come back to zero."""

    order: int
    prefill_request_num: int = 0
    prefill_token_num: int = 0
    prefill_us: int = 0
    decode_request_num: int = 0
    decode_token_num: int = 0

    def counts(self) -> Counts:
        return Counts(
            self.prefill_request_num,
            self.prefill_token_num,
            self.decode_request_num,
            self.decode_token_num,
            self.prefill_us / 1000,
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """A decision, as far as the counters are concerned."""

    request_id: str
    decision_id: str
    prompt_tokens: int
    prefill_order: int
    decode_order: int | None
    """None: the prefill instance serves alone."""
    predicted_ttft: float = 0.0
    """Milliseconds."""
    prefill_instance: str = ""
    predicted_hit_tokens: int | None = None
    """For the comparison with what the engine reports; None: nothing was predicted."""


@dataclass(slots=True)
class OpenRequest:
    """One request, as long as it is remembered."""

    opening: Opening
    prefill: _Life
    decode: _Life
    estimate_us: int
    expires_at: float
    prefilling: bool = True
    open: bool = True
    generated: int = 0
    total_reported: bool = False
    """Whether a GENERATE has said how many tokens there are in all."""
    cached_tokens_known: bool = False
    """Whether the engine's cached tokens have been reported; only the first report counts."""


@dataclass(frozen=True, slots=True)
class Report:
    """One progress report."""

    action: Action
    num_generated_tokens: int | None = None
    """Tokens generated so far, in all."""


@dataclass(slots=True)
class RequestMetrics:
    """The counters of all instances and the requests behind them."""

    expiry_seconds: float = EXPIRY_SECONDS
    max_open: int = MAX_OPEN
    expired_num: int = 0
    """Requests that ended without a report, since the start."""
    _lives: dict[int, _Life] = field(default_factory=dict)
    _open: OrderedDict[str, OpenRequest] = field(default_factory=OrderedDict)
    """By request ID, the one without news for longest first."""
    _closed: OrderedDict[str, OpenRequest] = field(default_factory=OrderedDict)

    # ---- what is under way

    def counts(self, order: int) -> Counts:
        """The counters of one life; zeros when nothing was ever sent there."""
        life = self._lives.get(order)
        return life.counts() if life is not None else Counts()

    @property
    def open_request_num(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def get(self, request_id: str) -> OpenRequest:
        """The request, under way or lately ended. Raises `UnknownRequestError`."""
        request = self._open.get(request_id) or self._closed.get(request_id)
        if request is None:
            raise UnknownRequestError(request_id)
        return request

    # ---- changes; each returns the lives (by `order`) that have nothing left to decode because of it

    def schedule(self, opening: Opening, now: float) -> list[int]:
        """Open a request and count it. Raises `RequestOpenError` when its ID is under way."""
        if opening.request_id in self._open:
            raise RequestOpenError(opening.request_id)
        prefill = self._life(opening.prefill_order)
        decode = prefill if opening.decode_order is None else self._life(opening.decode_order)
        request = OpenRequest(
            opening=opening,
            prefill=prefill,
            decode=decode,
            estimate_us=round(opening.predicted_ttft * 1000),
            expires_at=now + self.expiry_seconds,
        )
        prefill.prefill_request_num += 1
        prefill.prefill_token_num += opening.prompt_tokens
        prefill.prefill_us += request.estimate_us
        decode.decode_request_num += 1
        decode.decode_token_num += opening.prompt_tokens
        self._closed.pop(opening.request_id, None)
        self._open[opening.request_id] = request
        return self._expire_oldest() if len(self._open) > self.max_open else []

    def report(self, request_id: str, report: Report, now: float) -> list[int]:
        """Count what a gateway reports. A repetition changes nothing. Raises `UnknownRequestError`."""
        request = self.get(request_id)
        if not request.open:
            return []
        request.expires_at = now + self.expiry_seconds
        self._open.move_to_end(request_id)
        match report.action:
            case Action.FINISH_PREFILL:
                self._finish_prefill(request)
            case Action.GENERATE:
                _generate(request, report.num_generated_tokens)
            case Action.FINISH_DECODE | Action.CANCEL:
                return self._close(request, now)
            case Action.SCHEDULE:
                pass
        return []

    def expire(self, now: float) -> list[int]:
        """Undo requests without news for too long, and forget those that ended long ago."""
        idle: list[int] = []
        while self._open and next(iter(self._open.values())).expires_at <= now:
            idle += self._expire_oldest()
        while self._closed and next(iter(self._closed.values())).expires_at <= now:
            self._closed.popitem(last=False)
        return idle

    def retain(self, orders: Collection[int]) -> None:
        """Drop the counters of every life but these."""
        for order in [order for order in self._lives if order not in orders]:
            del self._lives[order]

    # ---- details

    def _life(self, order: int) -> _Life:
        life = self._lives.get(order)
        if life is None:
            life = self._lives[order] = _Life(order)
        return life

    def _finish_prefill(self, request: OpenRequest) -> None:
        if request.prefilling:
            self._leave_prefill(request)
            if not request.total_reported:
                _generate(request, None)

    def _leave_prefill(self, request: OpenRequest) -> None:
        if request.prefilling:
            request.prefilling = False
            request.prefill.prefill_request_num -= 1
            request.prefill.prefill_token_num -= request.opening.prompt_tokens
            request.prefill.prefill_us -= request.estimate_us

    def _undo(self, request: OpenRequest) -> list[int]:
        """Take off everything that is still counted for the request."""
        self._leave_prefill(request)
        request.open = False
        decode = request.decode
        decode.decode_request_num -= 1
        decode.decode_token_num -= request.opening.prompt_tokens + request.generated
        return [] if decode.decode_request_num else [decode.order]

    def _close(self, request: OpenRequest, now: float) -> list[int]:
        del self._open[request.opening.request_id]
        self._closed[request.opening.request_id] = request
        request.expires_at = now + self.expiry_seconds
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        return self._undo(request)

    def _expire_oldest(self) -> list[int]:
        _, request = self._open.popitem(last=False)
        self.expired_num += 1
        return self._undo(request)


def _generate(request: OpenRequest, total: int | None) -> None:
    """Count the tokens generated so far: one more, or this many in all."""
    request.total_reported |= total is not None
    added = 1 if total is None else total - request.generated
    request.generated += added
    request.decode.decode_token_num += added
