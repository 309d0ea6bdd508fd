"""What the routing app answers over HTTP: `select` and `progress`. No framework in here.

Each factory takes what its endpoint needs and returns the function that answers requests. Token,
method, size and readiness have been checked before (see `streams.http`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from routing.policies.candidates import what_is_missing
from routing.policies.decision import Excluded
from routing.policies.explanation import explain, why_excluded
from routing.records import Selection, decode_json, prefill_json
from routing.request_metrics import Action, Report, RequestOpenError, UnknownRequestError
from routing.selector import NoCandidatesError, Selector
from streams.body import flag_field, int_field, read_object, read_prompt, text_field
from streams.http import ApiError, Endpoint, Request, Response, json_response

MAX_TOKENS: Final = 2**31 - 1
NAMED_IN_MESSAGE: Final = 10
"""So many instances have their reason in the sentence of a `no_candidates`; the list has them all."""


def select_endpoint(selector: Selector, *, max_query_tokens: int) -> Endpoint:
    """`{"token_ids": [...], "request_id"?, "explain"?}` -> who prefills, who decodes.

    503 `no_candidates` with the reason of every instance, 409 for a `request_id` that is under way.
    Runs on the event loop: `max_query_tokens` bounds how long it holds it.
    """

    def select(request: Request) -> Response:
        body = read_prompt(request.body, max_tokens=max_query_tokens, fields=("request_id", "explain"))
        request_id = _request_id(body.fields)
        explained = flag_field(body.fields, "explain")
        try:
            selection = selector.select(body.prompt, request_id)
        except NoCandidatesError as error:
            return _no_candidates(error.selection)
        except RequestOpenError:
            raise ApiError(
                409,
                "request_open",
                "request_id names a request that is under way; report FINISH_DECODE or CANCEL for it first, "
                "or use another ID",
            ) from None
        return json_response(selection_json(selection, explained=explained))

    return select


def selection_json(selection: Selection, *, explained: bool) -> dict[str, Any]:
    """The answer; `explained` adds every candidate with its inputs and every exclusion."""
    answer = {
        "decision_id": selection.decision_id,
        "request_id": selection.request_id,
        "policy": str(selection.policy),
        "prefill": prefill_json(selection.decision),
        "decode": decode_json(selection.decision),
        "predicted_hit_tokens": selection.predicted_hit_tokens,
    }
    if explained:
        explanation = explain(selection.decision)
        answer["candidates"] = explanation.pop("candidates")
        answer["excluded"] = explanation.pop("excluded")
        answer["explanation"] = explanation
    return answer


def progress_endpoint(selector: Selector) -> Endpoint:
    """`{"action", "num_generated_tokens"?, "cached_tokens"?}` -> 204; 404 for an unknown request.

    The path's `request_id` is that of the decision. Keys that are not known are ignored.
    """

    def progress(request: Request) -> Response:
        fields = read_object(request.body)
        report = Report(_action(fields), int_field(fields, "num_generated_tokens", maximum=MAX_TOKENS))
        cached_tokens = int_field(fields, "cached_tokens", maximum=MAX_TOKENS)
        try:
            selector.report(request.params["request_id"], report, cached_tokens)
        except UnknownRequestError:
            raise ApiError(
                404,
                "unknown_request",
                "request_id is unknown here: it was never decided by this replica, ended long ago, or "
                f"expired after {selector.expiry_seconds:g} s without a report",
            ) from None
        return Response(204)

    return progress


def _request_id(fields: Mapping[str, Any]) -> str | None:
    """It becomes a part of a path, so what would break one is refused."""
    request_id = text_field(fields, "request_id")
    if request_id is not None and ("/" in request_id or not request_id.isprintable()):
        raise ApiError(400, "invalid_field", "request_id must not contain slashes or control characters")
    if request_id in (".", ".."):
        raise ApiError(
            400, "invalid_field", 'request_id must not be "." or ".."; as a part of a path they vanish'
        )
    return request_id


def _action(fields: Mapping[str, Any]) -> Action:
    name = text_field(fields, "action", required=True)
    try:
        return Action(name or "")
    except ValueError:
        allowed = ", ".join(action for action in Action if action is not Action.SCHEDULE)
        raise ApiError(400, "invalid_field", f"action must be one of {allowed}") from None


def _no_candidates(selection: Selection) -> Response:
    excluded = selection.decision.excluded
    return json_response(
        {
            "error": {"code": "no_candidates", "message": no_candidates_sentence(excluded)},
            "decision_id": selection.decision_id,
            "policy": str(selection.policy),
            "excluded": explain(selection.decision)["excluded"],
        },
        503,
    )


def no_candidates_sentence(excluded: Sequence[Excluded]) -> str:
    """Why nobody can take the request, instance by instance."""
    if not excluded:
        return "no instance is registered"
    reasons = [f"{item.instance.name}: {why_excluded(item)}" for item in excluded[:NAMED_IN_MESSAGE]]
    more = len(excluded) - len(reasons)
    tail = f"; and {more} more" if more > 0 else ""
    return f"{what_is_missing(excluded)}: {'; '.join(reasons)}{tail}"
