"""A simulated engine that speaks the real protocol over TCP, for demos, tests and benchmarks.

`SimulatedEngine` is the whole: ranks with caches, traffic and publishers. `EngineCache` is the pure model
of what a rank holds and publishes, `Publisher` the sockets alone, `Truth` what a test compares with.
`faults` names everything that can go wrong on purpose.
"""

from streams.simulator.blocks import Prompt
from streams.simulator.cache import CacheConfig, EngineCache
from streams.simulator.engine import EngineConfig, SimulatedEngine
from streams.simulator.publisher import Publisher
from streams.simulator.traffic import Traffic, TrafficConfig
from streams.simulator.truth import Truth

__all__ = [
    "CacheConfig",
    "EngineCache",
    "EngineConfig",
    "Prompt",
    "Publisher",
    "SimulatedEngine",
    "Traffic",
    "TrafficConfig",
    "Truth",
]
