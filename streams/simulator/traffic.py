"""Requests as a chat service sees them: few popular system prompts, question templates, long conversations.

System prompts and templates come from the *corpus seed*; engines with the same one hold overlapping
prefixes, as the engines of one service do. Which request comes next, and what users type, comes from the
engine's own seed. Pure and endless.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from streams.simulator.blocks import Prompt


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """Shape of the traffic. Lengths are in blocks, as `(least, most)`; shares are probabilities."""

    system_prompts: int = 8
    templates: int = 6
    """Question templates under each system prompt."""
    zipf_exponent: float = 1.1
    """Popularity of the n-th system prompt or template is 1/n to this power."""
    system_blocks: tuple[int, int] = (2, 8)
    template_blocks: tuple[int, int] = (1, 3)
    turn_blocks: tuple[int, int] = (1, 4)
    """What a user types plus what the engine answers, per turn."""
    conversations: int = 24
    """Conversations that are open at the same time."""
    turns: int = 6
    """Most turns in a conversation."""
    lora_share: float = 0.0
    """Share of conversations that run under a LoRA adapter."""
    image_share: float = 0.0
    """Share of conversations whose first question holds an image."""
    vocabulary: int = 150_000
    corpus_seed: int = 1


@dataclass(slots=True)
class _Conversation:
    tokens: list[int]
    turns_left: int
    lora: str | None
    images: dict[int, str]


class Traffic:
    """An endless source of prompts; `seed` orders it."""

    def __init__(self, block_size: int, config: TrafficConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or TrafficConfig()
        self._size = block_size
        self._rng = random.Random(seed)
        corpus = random.Random(self.config.corpus_seed)
        self.system_prompts: list[list[int]] = [
            self._text(corpus, self.config.system_blocks) for _ in range(self.config.system_prompts)
        ]
        """Token IDs of the system prompts, most popular first."""
        self._templates = [
            [self._text(corpus, self.config.template_blocks) for _ in range(self.config.templates)]
            for _ in self.system_prompts
        ]
        self._open: list[_Conversation] = []

    def next(self) -> Prompt:
        """The next request: the first turn of a new conversation or another turn of an open one."""
        new = len(self._open) < self.config.conversations and self._rng.random() < 0.5
        conversation = self._begin() if new or not self._open else self._rng.choice(self._open)
        conversation.tokens += self._text(self._rng, self.config.turn_blocks, ragged=True)
        conversation.turns_left -= 1
        if conversation.turns_left <= 0:
            self._open.remove(conversation)
        return Prompt(tuple(conversation.tokens), conversation.lora, dict(conversation.images))

    def _begin(self) -> _Conversation:
        family = self._popular(self.system_prompts)
        template = self._templates[family][self._popular(self._templates[family])]
        tokens = [*self.system_prompts[family], *template]
        lora = f"adapter-{family % 3}" if self._rng.random() < self.config.lora_share else None
        images = {}
        if self._rng.random() < self.config.image_share:
            images[len(tokens) // self._size] = f"image-{self._rng.randrange(1000)}"
        conversation = _Conversation(tokens, self._rng.randint(1, self.config.turns), lora, images)
        self._open.append(conversation)
        return conversation

    def _popular(self, items: Sequence[object]) -> int:
        weights = [1 / rank**self.config.zipf_exponent for rank in range(1, len(items) + 1)]
        return self._rng.choices(range(len(items)), weights)[0]

    def _text(self, rng: random.Random, blocks: tuple[int, int], ragged: bool = False) -> list[int]:
        tokens = rng.randint(*blocks) * self._size
        if ragged:
            tokens += rng.randrange(self._size)
        return rng.choices(range(self.config.vocabulary), k=tokens)
