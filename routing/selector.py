"""Decides who serves a request: the thin shell around the pure policies.

It reads three things, all of them in memory: the registry's snapshot, what the directory says of the
prompt, and its own counters; and it remembers two between decisions: whose turn it is, and which
requests are under way. The query of the index runs without a lock; deciding and counting are one
step under a lock, taken after the query, so that a decision sees the latest health of instances and
every decision before it. Nothing on this path waits for the network, etcd or the database.

The directory is asked under every policy: what it would have promised is compared with what engines
report, so that CAR can be judged before it is turned on.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from routing.decision_log import DecisionLog
from routing.hits import by_instance, predicted_hit_tokens
from routing.instances.model import InstanceView, Role, Rows, Snapshot
from routing.policies import car, round_robin, slo_aware
from routing.policies.decision import (
    Decision,
    Hits,
    Policy,
    RoleFlip,
    Rotation,
    Settings,
    Side,
    Situation,
    Work,
)
from routing.ports import NULL_METRICS, Index, Registry, RoutingMetrics
from routing.prediction_errors import Comparison, PredictionErrors
from routing.predictors import Predictor, fit_predictor
from routing.records import ROUTED, Selection
from routing.request_metrics import (
    EXPIRY_SECONDS,
    Counts,
    Opening,
    Report,
    RequestMetrics,
    RequestOpenError,
)

log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 4
COMPLAIN_SECONDS: Final = 60.0
FLIPPED: Final = {Side.PREFILL: Role.PREFILL, Side.DECODE: Role.DECODE}


class NoCandidatesError(Exception):
    """No instance can take the request; the selection says why for each of them."""

    def __init__(self, selection: Selection) -> None:
        super().__init__("no instance can take the request")
        self.selection = selection


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the start, for rates and means."""

    decisions: int = 0
    hit_ratio_sum: float = 0.0
    """Of predicted hit tokens to prompt tokens, over `hit_ratio_num` decisions."""
    hit_ratio_num: int = 0

    def plus(self, hit_ratio: float | None) -> Totals:
        """With one more decision; None: nothing was predicted for it."""
        known = hit_ratio is not None
        return Totals(self.decisions + 1, self.hit_ratio_sum + (hit_ratio or 0.0), self.hit_ratio_num + known)


@dataclass(slots=True)
class _Fitted:
    """A life's predictor, with the profile that it was fitted to."""

    profile: tuple[Rows, Rows]
    predictor: Predictor


@dataclass(slots=True)
class Selector:
    """One per process. All methods are thread-safe."""

    settings: Settings
    registry: Registry
    index: Index | None = None
    """None: the index is off, every hit ratio is 0."""
    decisions: DecisionLog = field(default_factory=DecisionLog)
    metrics: RoutingMetrics = NULL_METRICS
    expiry_seconds: float = EXPIRY_SECONDS
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _requests: RequestMetrics = field(init=False)
    _rotation: Rotation = field(default_factory=Rotation, init=False)
    _predictors: dict[int, _Fitted] = field(default_factory=dict, init=False)
    _topology: int = field(default=-1, init=False)
    _field: tuple[Snapshot, car.Field] = field(init=False)
    _totals: Totals = field(default_factory=Totals, init=False)
    _complained_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._requests = RequestMetrics(expiry_seconds=self.expiry_seconds)
        self._field = (Snapshot(), car.prepare(()))

    # ---- decisions

    def select(self, prompt: bytes, request_id: str | None = None) -> Selection:
        """Decide who serves a prompt (token IDs as packed little-endian uint32) and count it there.

        Raises `NoCandidatesError`, and `RequestOpenError` for an ID that is under way.
        """
        started = time.perf_counter()
        hits = self._hits(prompt)
        with self._lock:
            snapshot = self._settle()
            if request_id is not None and self._requests.is_open(request_id):
                raise RequestOpenError(request_id)
            decision = self._decide(snapshot, len(prompt) // TOKEN_BYTES, hits)
            selection = self._named(decision, request_id, started)
            self._count(selection, snapshot)
        self.metrics.observe_decision(selection.policy, selection.outcome)
        self.decisions.record(selection, prompt)
        if selection.outcome != ROUTED:
            raise NoCandidatesError(selection)
        return selection

    def preview(self, prompt: bytes, policy: Policy | None = None) -> Decision:
        """What a policy (None: the one in force) would decide now. Counts, remembers and flips nothing."""
        hits = self._hits(prompt)
        settings = replace(self.settings, policy=policy or self.settings.policy)
        with self._lock:
            return self._decided(self._settle(), len(prompt) // TOKEN_BYTES, hits, settings)

    def _hits(self, prompt: bytes) -> Hits:
        if self.index is None or not prompt:
            return {}
        try:
            return by_instance(self.index.query(prompt))
        except Exception:  # the cache may only ever improve a decision, not prevent it
            if self._may_complain():
                log.exception("the index failed on a query; deciding without it")
            return {}

    def _decide(self, snapshot: Snapshot, input_tokens: int, hits: Hits) -> Decision:
        decision = self._decided(snapshot, input_tokens, hits, self.settings)
        self._rotation = decision.rotation
        self._flip(decision.flip)
        return decision

    def _decided(self, snapshot: Snapshot, input_tokens: int, hits: Hits, settings: Settings) -> Decision:
        work = self._work(snapshot, input_tokens) if settings.policy is Policy.SLO_AWARE else {}
        situation = Situation(snapshot.instances, input_tokens, settings, hits, work, self._rotation)
        match settings.policy:
            case Policy.RR:
                return round_robin.decide(situation)
            case Policy.CAR:
                return car.decide(situation, self._car_field(snapshot))
            case Policy.SLO_AWARE:
                return slo_aware.decide(situation)

    def _car_field(self, snapshot: Snapshot) -> car.Field:
        """Prepared once per snapshot: decisions come more often than loads."""
        prepared_for, prepared = self._field
        if prepared_for is not snapshot:
            prepared = car.prepare(snapshot.instances)
            self._field = (snapshot, prepared)
        return prepared

    def _named(self, decision: Decision, request_id: str | None, started: float) -> Selection:
        decision_id = uuid.uuid4().hex
        return Selection(
            decision_id=decision_id,
            request_id=request_id or decision_id,
            at=self.wall_clock(),
            decision=decision,
            predicted_hit_tokens=None if self.index is None else predicted_hit_tokens(decision),
            seconds=time.perf_counter() - started,
        )

    def _count(self, selection: Selection, snapshot: Snapshot) -> None:
        decision, predicted = selection.decision, selection.predicted_hit_tokens
        tokens = decision.situation.input_tokens
        self._totals = self._totals.plus(None if predicted is None else predicted / tokens)
        if decision.prefill is None:
            return
        prefill = snapshot.by_name[decision.prefill.instance.name]
        opening = Opening(
            request_id=selection.request_id,
            decision_id=selection.decision_id,
            prompt_tokens=tokens,
            prefill_order=prefill.order,
            decode_order=None if decision.decode is None else decision.decode.instance.order,
            predicted_ttft=self._predictor(prefill).ttft(tokens) if tokens else 0.0,
            prefill_instance=prefill.name,
            predicted_hit_tokens=predicted,
        )
        self._let_go(self._requests.schedule(opening, self.clock()))

    # ---- progress

    def report(self, request_id: str, report: Report, cached_tokens: int | None = None) -> None:
        """Take a gateway's report. Raises `UnknownRequestError`."""
        with self._lock:
            snapshot = self._settle()
            request = self._requests.get(request_id)
            self._let_go(self._requests.report(request_id, report, self.clock()))
            if cached_tokens is not None and not request.cached_tokens_known:
                request.cached_tokens_known = True
                self._compare(request.opening, cached_tokens, snapshot)

    def _compare(self, opening: Opening, cached_tokens: int, snapshot: Snapshot) -> None:
        """Under the lock, so that nobody forgets the instance meanwhile."""
        self.decisions.feedback(opening.decision_id, cached_tokens)
        if opening.predicted_hit_tokens is None or opening.prefill_instance not in snapshot.by_name:
            return
        comparison = Comparison(self.wall_clock(), opening.predicted_hit_tokens, cached_tokens)
        self.errors.observe(opening.prefill_instance, comparison)
        self.metrics.observe_prediction_error(opening.prefill_instance, comparison.error_tokens)

    # ---- what operators see

    def counts(self) -> dict[str, Counts]:
        """What is under way on each registered instance, by name."""
        with self._lock:
            return {i.name: self._requests.counts(i.order) for i in self._settle().instances}

    def open_request_num(self) -> int:
        """Requests under way."""
        with self._lock:
            self._settle()
            return self._requests.open_request_num

    def totals(self) -> Totals:
        """Sums over all decisions since the start."""
        return self._totals

    def announce(self) -> None:
        """Say in the log which policy decides, with which weights, and whether the index takes part."""
        settings = self.settings
        log.info("routing policy %s (%s)", settings.policy, _weights(settings))
        if self.index is None:
            log.info(
                "the KV index is off (no --kv-events-config-file): nothing is known to be cached, "
                "kv_hit_ratio is 0 for every instance"
            )

    # ---- under the lock

    def _settle(self) -> Snapshot:
        """Let requests expire and forget instances that are gone; the snapshot to decide on."""
        snapshot = self.registry.snapshot()
        if snapshot.topology_version != self._topology:
            self._topology = snapshot.topology_version
            orders = {instance.order for instance in snapshot.instances}
            self._requests.retain(orders)
            self._predictors = {order: fit for order, fit in self._predictors.items() if order in orders}
            self.errors.retain(snapshot.by_name)
        idle = self._requests.expire(self.clock())
        self._let_go(idle)
        return self.registry.snapshot() if idle else snapshot

    def _let_go(self, idle: Iterable[int]) -> None:
        """Instances that have nothing left to decode may go back to prefill."""
        if self.settings.policy is not Policy.SLO_AWARE:
            return
        for order in idle:
            self._flip(slo_aware.flip_to_prefill(self.registry.snapshot().instances, order))

    def _flip(self, flip: RoleFlip | None) -> None:
        if flip is None:
            return
        if self.registry.set_current_role(flip.instance_name, flip.identity, FLIPPED[flip.to]):
            log.info("%s now takes %s", flip.instance_name, flip.to)

    def _work(self, snapshot: Snapshot, input_tokens: int) -> dict[str, Work]:
        return {i.name: self._work_of(i, input_tokens) for i in snapshot.instances if i.schedulable}

    def _work_of(self, instance: InstanceView, input_tokens: int) -> Work:
        counts, predictor = self._requests.counts(instance.order), self._predictor(instance)
        return Work(
            prefill_request_num=counts.prefill_request_num,
            prefill_token_num=counts.prefill_token_num,
            decode_request_num=counts.decode_request_num,
            decode_token_num=counts.decode_token_num,
            estimated_prefill_time=counts.estimated_prefill_time,
            predicted_ttft=predictor.ttft(input_tokens),
            predicted_tpot=predictor.tpot(
                batch=counts.decode_request_num + 1, total_tokens=counts.decode_token_num + input_tokens
            ),
        )

    def _predictor(self, instance: InstanceView) -> Predictor:
        """Fitted once per life, and again when it registers with another profile."""
        fitted, registration = self._predictors.get(instance.order), instance.registration
        profile = registration.ttft_profiling_data, registration.tpot_profiling_data
        if fitted is not None and fitted.profile == profile:
            # The same rows may come as other objects; those at hand now compare by identity next time.
            fitted.profile = profile
            return fitted.predictor
        predictor = fit_predictor(*profile)
        self._predictors[instance.order] = _Fitted(profile, predictor)
        return predictor

    def _may_complain(self) -> bool:
        """Not for every request."""
        now = self.clock()
        if now - self._complained_at < COMPLAIN_SECONDS:
            return False
        self._complained_at = now
        return True


def _weights(settings: Settings) -> str:
    match settings.policy:
        case Policy.RR:
            return "in turn, without weights"
        case Policy.CAR:
            return (
                f"car_prefill_lambda {settings.car_prefill_lambda:g}, "
                f"car_host_hit_weight {settings.car_host_hit_weight:g}"
            )
        case Policy.SLO_AWARE:
            return f"target_ttft {settings.target_ttft:g} ms, target_tpot {settings.target_tpot:g} ms"
