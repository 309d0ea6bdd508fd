"""P5: one CAR decision, the query of the index included; the answer's JSON is not."""

from __future__ import annotations

from benchmarks.filling import fill, new_stream, random_tokens
from benchmarks.report import Row, best_ms, median_ms
from routing.instances.core import Registered
from routing.instances.model import LoadReport, Registration
from routing.instances.registry import InstanceRegistry
from routing.policies.decision import Policy, Settings
from routing.selector import Selector
from streams.index import Index

BLOCKS = 1000
INSTANCES = 128


def run() -> list[Row]:
    tokens = random_tokens(BLOCKS)
    index, registry = Index(), InstanceRegistry()
    for number in range(INSTANCES):
        name = f"engine-{number}"
        fill(index, new_stream(index, name, max_blocks=4_000_000), tokens)
        registry.apply([Registered(Registration(name, incarnation_id="i"))])
        registry.heartbeat(name, "i", LoadReport(number % 7, 0.5))
    selector = Selector(Settings(policy=Policy.CAR), registry, index)
    chosen = selector.select(tokens).decision.prefill
    assert chosen is not None and chosen.kv_hit_ratio == 1.0
    text = f"CAR decision, {INSTANCES} instances that hold all {BLOCKS} blocks"
    alone = best_ms(lambda: index.query(tokens))
    return [
        Row("P5", text, best_ms(lambda: selector.select(tokens)), "ms", 1.0),
        Row("P5", f"{text}, median", median_ms(lambda: selector.select(tokens)), "ms"),
        Row("P5", "of which the query of the index", alone, "ms"),
    ]
