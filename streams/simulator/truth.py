"""What an engine really holds, for tests to compare answers with.

Naive on purpose and independent of the portal: blocks are found by comparing tuples of token IDs step by
step from the start of the prompt. There are no hashes and no content keys here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Step = tuple[int, tuple[int, ...]]
"""Number of the parent block (0: the start of the prompt) and the token IDs of the block itself."""


@dataclass(frozen=True, slots=True)
class Held:
    """One plain-text block that the engine remembers, and the tiers it is resident in."""

    number: int
    device: bool
    host: bool

    @property
    def resident(self) -> bool:
        return self.device or self.host


@dataclass(frozen=True, slots=True)
class Truth:
    """An immutable copy of one rank's state at one moment. Blocks with LoRA or images are only counted."""

    block_size: int
    blocks: Mapping[Step, Held]
    opaque_blocks: int
    """Resident blocks that no plain-text prompt can match, over both tiers."""

    def hits(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """`(device_hit_tokens, host_only_hit_tokens)`: whole blocks from the start, up to the first that
        is in neither tier."""
        device = host_only = 0
        for held in self._walk(token_ids):
            if not held.resident:
                break
            if held.device:
                device += self.block_size
            else:
                host_only += self.block_size
        return device, host_only

    def tiers(self, token_ids: Sequence[int]) -> list[str]:
        """Per whole block of the prompt: `device`, `host`, `both` or `missing`, wherever it stands."""
        names = {(True, True): "both", (True, False): "device", (False, True): "host"}
        found = [names.get((held.device, held.host), "missing") for held in self._walk(token_ids)]
        return found + ["missing"] * (len(token_ids) // self.block_size - len(found))

    @property
    def device_blocks(self) -> int:
        """Plain-text blocks on the device."""
        return sum(held.device for held in self.blocks.values())

    @property
    def host_blocks(self) -> int:
        """Plain-text blocks on the host; a block in both tiers counts in both."""
        return sum(held.host for held in self.blocks.values())

    @property
    def placed_device_blocks(self) -> int:
        """Those of `device_blocks` whose ancestors are all resident: what a snapshot alone can place."""
        return sum(held.device for held in self._placed())

    @property
    def placed_host_blocks(self) -> int:
        """Those of `host_blocks` whose ancestors are all resident."""
        return sum(held.host for held in self._placed())

    def prompts(self) -> Iterator[list[int]]:
        """Every longest prompt that the engine remembers, as token IDs, whether resident or not."""
        steps = {held.number: step for step, held in self.blocks.items()}
        parents = {parent for parent, _ in self.blocks}
        for leaf in steps.keys() - parents:
            path: list[tuple[int, ...]] = []
            number = leaf
            while number:
                number, tokens = steps[number]
                path.append(tokens)
            yield [token for tokens in reversed(path) for token in tokens]

    def _walk(self, token_ids: Sequence[int]) -> Iterator[Held]:
        parent = 0
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            held = self.blocks.get((parent, tuple(token_ids[start : start + self.block_size])))
            if held is None:
                return
            yield held
            parent = held.number

    def _placed(self) -> Iterator[Held]:
        children: dict[int, list[Held]] = {}
        for (parent, _), held in self.blocks.items():
            children.setdefault(parent, []).append(held)
        waiting = [0]
        while waiting:
            for held in children.get(waiting.pop(), ()):
                if held.resident:
                    yield held
                    waiting.append(held.number)
