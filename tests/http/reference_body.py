"""A naive reader of prompt bodies, to compare the fast one with."""

from __future__ import annotations

import json
from typing import Any

MAX = 2**31 - 1


class Pairs(list):
    """A JSON object as its pairs."""


def read(body: bytes, max_tokens: int) -> list[int] | tuple[int, str]:
    """The token IDs, or status and code of the refusal."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=Pairs, parse_constant=refuse)
    except ValueError:
        return 400, "invalid_json"
    if not isinstance(value, Pairs):
        return 400, "invalid_field"
    keys = [key for key, _ in value]
    if any(keys.count(key) > 1 for key in keys):
        return 400, "invalid_field"
    if "token_ids" not in keys:
        return 400, "invalid_field"
    tokens = dict(value)["token_ids"]
    if not isinstance(tokens, list) or isinstance(tokens, Pairs):
        return 400, "invalid_field"
    if len(tokens) > max_tokens:
        return 413, "too_many_tokens"
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX:
            return 400, "invalid_field"
    return tokens if is_plain(value) else (400, "invalid_field")


def is_plain(value: Any) -> bool:
    """No integer of more than 64 bits, no infinite float, no lone surrogate."""
    match value:
        case Pairs():
            return all(is_plain(key) and is_plain(item) for key, item in value)
        case list():
            return all(map(is_plain, value))
        case bool() | None:
            return True
        case int():
            return -(2**63) <= value < 2**64
        case float():
            return abs(value) < float("inf")
        case str():
            return not any("\ud800" <= character <= "\udfff" for character in value)
    raise AssertionError(value)
