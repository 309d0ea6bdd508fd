"""A simulated engine: the cache of each rank, its publisher, and traffic that drives them.

Tests drive it message by message (`step`); the command and the demo let it run free (`start`). Each rank
keeps its cache and its sequence under one lock, so that a snapshot always fits its watermark. That lock is
never held while waiting for a socket.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import zmq

from streams.simulator.blocks import Prompt
from streams.simulator.cache import CacheConfig, EngineCache
from streams.simulator.faults import LIVE_FAULTS, SNAPSHOT_FAULTS, Good, SnapshotFault
from streams.simulator.messages import Event, Snapshot, block_removed, block_stored
from streams.simulator.ports import free_ports
from streams.simulator.publisher import Publisher, PublisherConfig, Watermark
from streams.simulator.sockets import Context
from streams.simulator.traffic import Traffic, TrafficConfig
from streams.simulator.truth import Truth
from streams.spec import StreamSpec

_PORT_ATTEMPTS = 200
_BURST_S = 1.0
"""Traffic that fell further behind than this is not caught up."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything about a simulated engine that does not change while it runs."""

    dp_size: int = 1
    topic: str = "xllm-kv"
    host: str = "127.0.0.1"
    """Address to listen on: IPv4, or IPv6 without brackets."""
    event_port: int = 0
    """Port of rank 0's live channel; rank r uses the r-th after it. 0: free ones are chosen."""
    replay_port: int = 0
    """Port of rank 0's snapshots, in the same way."""
    first_sequence: int = 0
    watermark: Watermark = "last"
    snapshot_parts: int = 1
    chunk_blocks: int = 32
    """Blocks that one message stores at most; longer prompts take several, as with chunked prefill."""
    clear_probability: float = 0.0
    """Chance that a message is `AllBlocksCleared` instead of a request."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)


class Rank:
    """One data-parallel rank. Thread-safe."""

    def __init__(self, config: EngineConfig, dp_rank: int, seed: int, publisher: Publisher) -> None:
        self.dp_rank = dp_rank
        self.publisher = publisher
        self._config = config
        self._lock = threading.RLock()
        self._begin(seed)
        publisher.snapshot = self._snapshot

    def step(self, *, send: bool = True) -> int:
        """Let traffic cause one message; returns how many events it has. Unsent, it is counted and lost."""
        with self._lock:
            return self._emit(self._next_events(), send)

    def store(self, prompt: Prompt | Sequence[int], *, send: bool = True) -> int:
        """Run one request of the caller's; returns how many events its message has (0: none was needed)."""
        with self._lock:
            return self._emit(self._cache.store(prompt), send)

    def clear(self) -> None:
        """Publish `AllBlocksCleared` and forget everything."""
        with self._lock:
            self._chunks.clear()
            self._emit(self._cache.clear(), True)

    def publish(self, events: Sequence[Event]) -> int:
        """Publish events that the cache knows nothing of; returns the sequence."""
        with self._lock:
            return self.publisher.publish(events)

    def restart(self, seed: int, first_sequence: int, visible: bool) -> Future[None] | None:
        """Continue as a new process: empty cache, other hashes, other traffic, its own sequence.

        A visible restart drops the connections before the first new message; the future tells when the
        ports are bound again.
        """
        with self._lock:
            self._begin(seed)
            self.publisher.set_sequence(first_sequence)
            return self.publisher.drop_connection(wait=False) if visible else None

    def truth(self) -> Truth:
        """What the rank holds now."""
        with self._lock:
            return self._cache.truth()

    def device_usage(self) -> float:
        """Filled share of the device tier, 0 … 1."""
        with self._lock:
            return self._cache.device_usage

    def state(self) -> dict[str, Any]:
        """Numbers for people, as JSON."""
        with self._lock:
            return {
                "dp_rank": self.dp_rank,
                "endpoint": self.publisher.endpoint,
                "replay_endpoint": self.publisher.replay_endpoint,
                "next_sequence": self.publisher.next_sequence,
                "device_blocks": self._cache.device_blocks,
                "host_blocks": self._cache.host_blocks,
                "pending_copies": self._cache.pending_copies,
                "subscribers": self.publisher.subscribers,
                "replay_requests": self.publisher.replay_requests,
            }

    def popular_prompts(self) -> list[list[int]]:
        """The system prompts of the traffic as token IDs, most popular first."""
        with self._lock:
            return self._traffic.system_prompts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No message and no snapshot of this rank while the block runs. Do not wait for the socket inside."""
        with self._lock:
            yield

    def _begin(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._cache = EngineCache(self._config.cache, seed=seed)
        self._traffic = Traffic(self._config.cache.block_size, self._config.traffic, seed=seed)
        self._chunks: deque[Prompt] = deque()

    def _snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(self.publisher.current_watermark(), self._cache.snapshot())

    def _emit(self, events: list[Event], send: bool) -> int:
        if events and send:
            self.publisher.publish(events)
        elif events:
            self.publisher.skip_sequence()
        return len(events)

    def _next_events(self) -> list[Event]:
        if self._rng.random() < self._config.clear_probability:
            return self._cache.clear()
        while True:
            if not self._chunks:
                self._chunks.extend(self._in_chunks(self._traffic.next()))
            elif events := self._cache.store(self._chunks.popleft()):
                return events

    def _in_chunks(self, prompt: Prompt) -> Iterator[Prompt]:
        step = self._config.chunk_blocks * self._config.cache.block_size
        length = len(prompt.token_ids)
        return (prompt.upto(min(length, end)) for end in range(step, length + step, step))


class SimulatedEngine:
    """An engine of `dp_size` ranks on consecutive ports.

    The common settings are keywords (`block_size`, `device_blocks`, … go to `CacheConfig`, `dp_size`,
    `topic`, … to `EngineConfig`); `traffic` shapes the requests. With the same seed and calls, the same
    events appear. Use as a context manager, or call `close`.

        with SimulatedEngine(seed=1, dp_size=2, host_blocks=64) as engine:
            engine.step(10)
            engine.truth(rank=1).hits(token_ids)
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        config: EngineConfig | None = None,
        lossless: bool = False,
        context: Context | None = None,
        **settings: Any,
    ) -> None:
        self.config = configure(config or EngineConfig(), **settings)
        self.seed = seed
        self.lives = 1
        """Grows by one with each restart."""
        self._rate = 0.0
        self._traffic: threading.Thread | None = None
        self._changed = threading.Condition()
        self._running = False
        self._context: Context = context or zmq.Context()
        self._owns_context = context is None
        try:
            publishers = self._open_publishers(lossless)
        except BaseException:
            self._term()
            raise
        self.ranks = tuple(
            Rank(self.config, dp_rank, self._rank_seed(dp_rank), publisher)
            for dp_rank, publisher in enumerate(publishers)
        )

    # -- where it listens -----------------------------------------------------------------------------

    def endpoint(self, rank: int = 0) -> str:
        """Live channel of a rank, `tcp://host:port`."""
        return self.ranks[rank].publisher.endpoint

    def replay_endpoint(self, rank: int = 0) -> str:
        """Snapshot channel of a rank, `tcp://host:port`."""
        return self.ranks[rank].publisher.replay_endpoint

    def spec(self, rank: int = 0, instance_name: str = "simulated", **changes: Any) -> StreamSpec:
        """The stream of one rank as the portal would be told of it."""
        spec = StreamSpec(
            instance_name=instance_name,
            dp_rank=rank,
            endpoint=self.endpoint(rank),
            replay_endpoint=self.replay_endpoint(rank),
            block_size=self.config.cache.block_size,
            topic=self.config.topic,
        )
        return replace(spec, **changes)

    def chosen(self, rank: int | None) -> tuple[Rank, ...]:
        """That rank, or all of them."""
        return self.ranks if rank is None else (self.ranks[rank],)

    # -- traffic --------------------------------------------------------------------------------------

    def step(self, messages: int = 1, *, rank: int | None = None, wait: bool = True) -> None:
        """Publish that many messages on each rank, or on one; `wait` until the sockets took them."""
        for each in self.chosen(rank):
            for _ in range(messages):
                each.step()
        if wait:
            self.flush(rank)

    def flush(self, rank: int | None = None) -> None:
        """Wait until everything published was handed to the sockets."""
        for each in self.chosen(rank):
            each.publisher.flush()

    def start(self, rate: float) -> None:
        """Run free on a thread at about `rate` events per second over all ranks."""
        self.set_rate(rate)
        if self._traffic is None:
            self._running = True
            self._traffic = threading.Thread(target=self._run, name="sim-traffic", daemon=True)
            self._traffic.start()

    def set_rate(self, rate: float) -> None:
        """Events per second from now on; 0 pauses."""
        if not 0 <= rate < float("inf"):
            raise ValueError(f"rate is {rate}; allowed: 0 or more events per second")
        with self._changed:
            self._rate = rate
            self._changed.notify_all()

    @property
    def rate(self) -> float:
        """Events per second asked for."""
        return self._rate

    def stop(self) -> None:
        """End free running; sockets stay open and answer."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._traffic is not None:
            self._traffic.join()
            self._traffic = None

    def truth(self, rank: int = 0) -> Truth:
        """What a rank holds now."""
        return self.ranks[rank].truth()

    def wait_for_subscribers(self, timeout: float = 10.0) -> None:
        """Wait until every rank has a subscriber; what is published afterwards reaches it."""
        for each in self.ranks:
            each.publisher.wait_for_subscribers(1, timeout)

    # -- faults ---------------------------------------------------------------------------------------

    def skip_sequence(self, count: int = 1, *, rank: int | None = None) -> None:
        """Leave out sequence numbers: a hole that shows with the next message; nothing is lost."""
        for each in self.chosen(rank):
            each.publisher.skip_sequence(count)

    def lose_messages(self, messages: int = 1, *, rank: int | None = None) -> None:
        """Change the cache and count the messages, but send none: a lost tail until the next message."""
        for each in self.chosen(rank):
            for _ in range(messages):
                each.step(send=False)

    def drop_connection(
        self, *, live: bool = True, replay: bool = True, down_s: float = 0.0, rank: int | None = None,
        wait: bool = True,
    ) -> None:  # fmt: skip
        """Close the sockets and bind the same ports again after `down_s` seconds."""
        rebound = [
            each.publisher.drop_connection(live=live, replay=replay, down_s=down_s, wait=False)
            for each in self.chosen(rank)
        ]
        for future in rebound:
            if wait:
                future.result()

    def spoil_snapshots(
        self, fault: str | SnapshotFault | None, times: int | None = None, *, rank: int | None = None
    ) -> None:
        """Spoil snapshot replies: by a name in `SNAPSHOT_FAULTS`, or by `faults.slow(…)` and the like."""
        spoiler = SNAPSHOT_FAULTS[fault] if isinstance(fault, str) else fault
        for each in self.chosen(rank):
            each.publisher.spoil_snapshots(spoiler, times)

    def send_malformed(self, fault: str, *, rank: int | None = None) -> None:
        """Send one live message with a fault of `LIVE_FAULTS`."""
        for each in self.chosen(rank):
            self._send_malformed(each, fault)

    def restart(self, *, visible: bool = True, first_sequence: int | None = None) -> None:
        """Become a new process with other content, its sequence back at the start.

        A visible restart drops all connections; an invisible one goes on with the same sockets.
        """
        first = self.config.first_sequence if first_sequence is None else first_sequence
        self.lives += 1
        rebound = [each.restart(self._rank_seed(each.dp_rank), first, visible) for each in self.ranks]
        for future in rebound:
            if future is not None:
                future.result()

    def flood(self, messages: int, *, rank: int | None = None, distinct: int = 64, wait: bool = True) -> None:
        """Send that many messages at full speed, encoded beforehand.

        They store and remove blocks of their own in turn and end with all of them removed, so that the
        rank's truth is the same afterwards.
        """
        futures = []
        for each in self.chosen(rank):
            payloads = [each.publisher.encode(events) for events in self._flood_events(distinct)]
            futures.append(each.publisher.flood(payloads, messages + messages % 2))
        for future in futures:
            if wait:
                future.result()

    # -- end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End traffic, close every socket, join every thread. May be called twice."""
        self.stop()
        for each in self.ranks:
            each.publisher.close()
        self._term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------

    def _rank_seed(self, dp_rank: int) -> int:
        return (self.seed * 1000 + self.lives) * 1000 + dp_rank

    def _term(self) -> None:
        if self._owns_context:
            self._context.term()

    def _send_malformed(self, rank: Rank, name: str) -> None:
        fault = LIVE_FAULTS[name]
        publisher = rank.publisher
        with rank.paused():
            sequence = publisher.skip_sequence() if fault.counts else 0
            good = Good(
                publisher.topic, sequence, rank.dp_rank, self.config.cache.block_size,
                random.Random(sequence),
            )  # fmt: skip
            publisher.send_frames(fault.build(good))
        publisher.flush()

    def _flood_events(self, distinct: int) -> Iterator[list[Event]]:
        rng = random.Random(self.seed)
        size = self.config.cache.block_size
        for _ in range(distinct):
            block_hash = rng.getrandbits(64)
            tokens = rng.choices(range(150_000), k=size)
            yield [block_stored([block_hash], None, tokens, size)]
            yield [block_removed([block_hash])]

    def _open_publishers(self, lossless: bool) -> list[Publisher]:
        fixed = bool(self.config.event_port and self.config.replay_port)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            with ExitStack() as opened:
                publishers = []
                try:
                    for dp_rank, endpoints in enumerate(self._endpoints()):
                        publisher = self._publisher(dp_rank, *endpoints, lossless)
                        publishers.append(opened.enter_context(publisher))
                except OSError:
                    if fixed or attempt == _PORT_ATTEMPTS:
                        raise
                    continue
                opened.pop_all()
                return publishers
        raise AssertionError("the last attempt returns or raises")

    def _endpoints(self) -> list[tuple[str, str]]:
        config = self.config
        event_port = config.event_port or free_ports(config.host, config.dp_size)
        replay_port = config.replay_port or free_ports(config.host, config.dp_size)
        host = f"[{config.host}]" if ":" in config.host else config.host
        return [
            (f"tcp://{host}:{event_port + dp_rank}", f"tcp://{host}:{replay_port + dp_rank}")
            for dp_rank in range(config.dp_size)
        ]

    def _publisher(self, dp_rank: int, endpoint: str, replay_endpoint: str, lossless: bool) -> Publisher:
        config = PublisherConfig(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=self.config.topic,
            dp_rank=dp_rank,
            first_sequence=self.config.first_sequence,
            watermark=self.config.watermark,
            snapshot_parts=self.config.snapshot_parts,
            lossless=lossless,
        )
        return Publisher(config, context=self._context, seed=self._rank_seed(dp_rank))

    def _run(self) -> None:
        rng = random.Random(self.seed)
        due = time.monotonic()
        while True:
            with self._changed:
                if not self._running:
                    return
                rate, now = self._rate, time.monotonic()
                if rate == 0:
                    self._changed.wait()
                    due = time.monotonic()
                    continue
                due = max(due, now - _BURST_S)
                if due > now:
                    self._changed.wait(due - now)
                    continue
            due += rng.choice(self.ranks).step() / rate


def configure(config: EngineConfig, **settings: Any) -> EngineConfig:
    """`config` with changes, each under the name of its field in `EngineConfig` or `CacheConfig`."""
    cache_names = {each.name for each in fields(CacheConfig)}
    cache = {name: value for name, value in settings.items() if name in cache_names}
    rest = {name: value for name, value in settings.items() if name not in cache_names}
    return replace(config, **({"cache": replace(config.cache, **cache)} | rest))
