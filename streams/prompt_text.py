"""Token IDs as people paste them: a JSON list, a whole request body, or just numbers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_TOKENS = 262_144
MAX_TOKEN_ID = 2**31 - 1
_SEPARATORS = re.compile(r"[\s,;]+")
_SHOWN = 20


class PromptTextError(ValueError):
    """What was pasted is not a list of token IDs; the text says what is wrong and what is expected."""


def parse_prompt(text: str) -> bytes:
    """The token IDs in `text` as packed little-endian uint32. Raises PromptTextError."""
    text = text.strip()
    if not text:
        raise PromptTextError(
            "Nothing to look up. Paste the token IDs of a prompt, for example: 101, 2023, 318."
        )
    items = _from_json(text) if text[0] in "[{" else _from_words(text)
    if not items:
        raise PromptTextError("The list of token IDs is empty. Paste at least one.")
    if len(items) > MAX_TOKENS:
        raise PromptTextError(f"{len(items):,} token IDs; at most {MAX_TOKENS:,} can be looked up at once.")
    for position, item in enumerate(items, start=1):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise PromptTextError(
                f"Item {position:,} is {_show(item)}. Token IDs are whole numbers from 0 to "
                f"{MAX_TOKEN_ID:,}; text has to be tokenized first."
            )
    return np.array(items, dtype="<u4").tobytes()


def _from_json(text: str) -> Sequence[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise PromptTextError(
            'It starts like JSON and is not. Paste [101, 2023, 318], {"token_ids": [101, 2023, 318]} '
            "or just the numbers."
        ) from None
    if isinstance(value, dict):
        value = value.get("token_ids")
    if not isinstance(value, list):
        raise PromptTextError('The JSON has no list of token IDs. Paste [101, …] or {"token_ids": [101, …]}.')
    return value


def _from_words(text: str) -> list[Any]:
    return [
        int(word) if word.isascii() and word.isdigit() and len(word) < 11 else word
        for word in _SEPARATORS.split(text)
        if word
    ]


def _show(item: Any) -> str:
    shown = json.dumps(item, ensure_ascii=False) if not isinstance(item, str) else f"“{item}”"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
