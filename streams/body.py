"""JSON request bodies: prompts of up to hundreds of thousands of token IDs, and small objects.

A prompt is read by simdjson, which hands the whole list over as one buffer of 64-bit integers, so
that no Python object is made per token. It only says yes or no: what it refuses is read a second time
by the standard library, slowly, for the sentence that names the element. simdjson's own verdict stands;
it goes beyond JSON's grammar in four places, which a body must keep to as well: integers fit into 64
bits, floats are finite, strings are valid Unicode (no lone surrogates), nesting ends at 1,024 levels.

`invalid_json` says that a body is no JSON at all; whatever else is wrong with it is `invalid_field`.

Rules for every body: UTF-8 (a byte-order mark is skipped), one object, no key twice. An optional
field that is null is the same as an absent one.

Everything here holds the GIL from the first byte to the last (simdjson and `json` both do), so a
body is never handed to a thread: that would cost the hand-over and free nobody.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import simdjson

from streams.http import ApiError

TOKEN_IDS = "token_ids"  # noqa: S105 -- a field's name
MAX_TOKEN_ID = 2**31 - 1
MAX_KEYS = 256
"""Keys of a body with a prompt, those that are ignored included."""
SMALL_BODY_BYTES = 1024 * 1024
"""Default bound of `read_object`: reading stalls the event loop by at most some 20 ms."""

_COUNTED_BYTES = 4 * 1024 * 1024
"""A longer body has its commas counted before it is parsed, because 16 MiB of `0,` would hold the GIL for
a tenth of a second. Token IDs within the usual bound need less."""
_DIAGNOSED_COMMAS = 262_144
"""With more, a second and slower reading would take too long: no position is given then."""
_REUSED_PARSER_BYTES = 2 * 1024 * 1024
"""A parser keeps about ten times the size of the largest body it has seen; beyond this one it is
thrown away. Reuse is worth it: at 4k and 32k tokens it halves the time."""

_COMMA = ord(",")


@dataclass(frozen=True, slots=True)
class PromptBody:
    """A prompt, and the other fields asked for."""

    prompt: bytes
    """Token IDs as packed little-endian uint32."""
    count: int
    """Number of token IDs."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Those of the fields asked for that the body has, as plain Python values, not yet validated."""


def read_prompt(body: bytes, *, max_tokens: int, fields: Collection[str] = ()) -> PromptBody:
    """Reads `{"token_ids": [...], ...}`.

    `fields` names the other keys to hand over. Keys beyond these are ignored: a gateway newer than the
    portal may send more. ApiError: 400 `invalid_json` or `invalid_field`, 413 `too_many_tokens`.
    """
    if len(body) > _COUNTED_BYTES and _commas(body) > max_tokens:
        raise _too_many_tokens(max_tokens)
    try:
        result = _parse_prompt(body, max_tokens, fields)
    except (ValueError, RuntimeError):  # what simdjson raises for a body that is not JSON to it
        result = _diagnose(body, max_tokens)
    if isinstance(result, ApiError):
        raise result
    return result


_local = threading.local()


def _parser(size: int) -> simdjson.Parser:
    """A parser for a body of this size. Never shared between threads: parsing overwrites its buffers."""
    if size > _REUSED_PARSER_BYTES:
        return simdjson.Parser()
    parser: simdjson.Parser | None = getattr(_local, "parser", None)
    if parser is None:
        parser = _local.parser = simdjson.Parser()
    return parser


def _parse_prompt(body: bytes, max_tokens: int, fields: Collection[str]) -> PromptBody | ApiError:
    """Faults are returned: an exception would keep this frame, and with it the parsed document, alive,
    and a parser refuses to be reused while its last document lives."""
    document: Any = _parser(len(body)).parse(body)
    keys = list(islice(document, MAX_KEYS + 1)) if isinstance(document, simdjson.Object) else None
    error = _object_fault(document, keys)
    if error is not None:
        return error
    tokens = document[TOKEN_IDS]
    error = _list_fault(tokens, max_tokens)
    if error is not None:
        return error
    # `as_buffer` flattens nested lists: with a second bracket anywhere, every element is looked at.
    if body.find(b"[") != body.rfind(b"["):
        error = _element_fault(tokens)
        if error is not None:
            return error
    try:
        ids = np.frombuffer(tokens.as_buffer(of_type="u"), dtype="<u8")
    except (TypeError, ValueError):
        return _element_fault(tokens) or _beyond_json()
    if ids.size and ids.max() > MAX_TOKEN_ID:
        return _element_fault(tokens) or _beyond_json()
    others = {key: _plain(document[key]) for key in fields if key in keys} if fields and keys else {}
    return PromptBody(ids.astype("<u4").tobytes(), ids.size, others)


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value


def _diagnose(body: bytes, max_tokens: int) -> ApiError:
    """Why simdjson refused this body, in words and with a position. Slow, so bounded by the commas."""
    if _commas(body) > _DIAGNOSED_COMMAS:
        return _bad_json("the body is not valid JSON")
    try:
        document, keys = _strict_json(body)
    except ApiError as error:
        return error
    fault = _object_fault(document, keys)
    if fault is None:
        tokens = document[TOKEN_IDS]
        fault = _list_fault(tokens, max_tokens) or _element_fault(tokens)
    return fault or _beyond_json()


def _object_fault(document: object, keys: Sequence[str] | None) -> ApiError | None:
    if keys is None:
        return _bad_field(f"the body must be a JSON object, found {_describe(document)}")
    duplicate = _duplicate(keys)
    if duplicate is not None:
        return _duplicate_key(duplicate)
    if len(keys) > MAX_KEYS:
        return _bad_field(f"the body must have at most {MAX_KEYS} keys")
    if TOKEN_IDS not in keys:
        return _bad_field("token_ids is missing; it must be a list of token IDs")
    return None


def _list_fault(tokens: object, max_tokens: int) -> ApiError | None:
    if not isinstance(tokens, list | simdjson.Array):
        return _bad_field(f"token_ids must be a list of token IDs, found {_describe(tokens)}")
    return _too_many_tokens(max_tokens) if len(tokens) > max_tokens else None


def _element_fault(tokens: Iterable[object]) -> ApiError | None:
    """The first element that is no token ID. Booleans are integers to Python, not to us."""
    for position, value in enumerate(tokens):
        if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
            allowed = f"an integer from 0 to {MAX_TOKEN_ID}"
            return _bad_field(f"token_ids[{position}] must be {allowed}, found {_describe(value)}")
    return None


def _commas(body: bytes) -> int:
    """A bound on the number of list elements, in a few milliseconds even for 16 MiB."""
    return int(np.count_nonzero(np.frombuffer(body, dtype=np.uint8) == _COMMA))


def _duplicate(keys: Sequence[str]) -> str | None:
    if len(set(keys)) == len(keys):
        return None
    return next(key for position, key in enumerate(keys) if key in keys[:position])


class _Pairs(dict[str, Any]):
    """A JSON object that remembers its keys as they came, duplicates included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.keys_as_sent = [key for key, _ in pairs]


def _refuse_constant(name: str) -> None:
    raise _bad_json(f"the body is not valid JSON: {name} is no JSON value")


def _strict_json(body: bytes) -> tuple[Any, list[str] | None]:
    """The document, and the keys of the outermost object with duplicates; None when it is no object."""
    if not body.strip():
        raise _bad_json("the body is empty; it must be a JSON object")
    try:
        text = body.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _bad_json(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise _bad_json(f"the body is not UTF-8: byte {error.start} does not fit") from None
    except ValueError:
        raise _bad_field("the body holds a number with too many digits") from None
    except RecursionError:
        raise _bad_field("the body is nested too deeply") from None
    return document, document.keys_as_sent if isinstance(document, _Pairs) else None


def read_object(
    body: bytes, *, known: Collection[str] | None = None, max_bytes: int = SMALL_BODY_BYTES
) -> dict[str, Any]:
    """Reads one small JSON object.

    `known` lists the keys there are, and any other is refused by name; without it every key is taken.
    Integers come in any size. ApiError: 400 `invalid_json` or `invalid_field`, 413 `body_too_large`.
    """
    if len(body) > max_bytes:
        raise body_too_large(max_bytes)
    document, keys = _strict_json(body)
    if keys is None:
        raise _bad_field(f"the body must be a JSON object, found {_describe(document)}")
    duplicate = _duplicate(keys)
    if duplicate is not None:
        raise _duplicate_key(duplicate)
    unknown = [key for key in keys if known is not None and key not in known]
    if unknown:
        raise _bad_field(f"{_shorten(unknown[0])} is not a field here; known are {', '.join(known or ())}")
    return dict(document)


def text_field(
    fields: Mapping[str, Any], name: str, *, required: bool = False, max_length: int = 256
) -> str | None:
    """A non-empty string of at most `max_length` characters; None when absent or null."""
    value = fields.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= max_length or not _is_unicode(value):
        raise _bad_field(f"{name} must be a string of 1 to {max_length} characters, {_found(fields, name)}")
    return value


def int_field(
    fields: Mapping[str, Any],
    name: str,
    *,
    minimum: int = 0,
    maximum: int = 2**63 - 1,
    required: bool = False,
) -> int | None:
    """An integer within the bounds (no boolean, no float); None when absent or null."""
    value = fields.get(name)
    if value is None and not required:
        return None
    if type(value) is not int or not minimum <= value <= maximum:
        allowed = f"an integer from {minimum} to {maximum}"
        raise _bad_field(f"{name} must be {allowed}, {_found(fields, name)}")
    return value


def flag_field(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A boolean; `default` when absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad_field(f"{name} must be true or false, {_found(fields, name)}")
    return value


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body must be at most {limit} bytes")


def _too_many_tokens(limit: int) -> ApiError:
    return ApiError(
        413,
        "too_many_tokens",
        f"token_ids must hold at most {limit} token IDs (KVPORTAL_MAX_QUERY_TOKENS)",
    )


def _beyond_json() -> ApiError:
    return _bad_field(
        "the body holds what is not read here: an integer of more than 64 bits, a float that is not "
        "finite, a lone surrogate in a string, or more than 1024 levels of nesting"
    )


def _bad_json(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)


def _bad_field(message: str) -> ApiError:
    return ApiError(400, "invalid_field", message)


def _duplicate_key(key: str) -> ApiError:
    return _bad_field(f"the key {_shorten(key)} appears twice in the body")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shorten(text: str) -> str:
    shown = text if len(text) <= 60 else text[:60] + "..."
    return shown.encode("ascii", "backslashreplace").decode()


def _found(fields: Mapping[str, Any], name: str) -> str:
    return "found none" if name not in fields else f"found {_describe(fields[name])}"


def _describe(value: object) -> str:
    """A value for a sentence. The text of a string stays out: it may be a prompt."""
    match value:
        case None:
            return "null"
        case bool():
            return "the boolean true" if value else "the boolean false"
        case int():
            return str(value) if abs(value) < 10**30 else "an integer of more than 30 digits"
        case float():
            return f"the float {value!r}"
        case str():
            return "an empty string" if not value else f"a string of {len(value)} characters"
        case Mapping() | simdjson.Object():
            return "an object"
    return "a list"
