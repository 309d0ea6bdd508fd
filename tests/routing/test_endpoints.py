"""The two endpoint functions by their contract: bytes in, status and JSON out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from routing.endpoints import progress_endpoint, select_endpoint
from routing.instances.model import HealthState, InstanceView
from routing.policies.decision import Policy, Settings
from routing.selector import Selector
from streams.http import ApiError, Request, Response
from tests.routing.builders import instance, match
from tests.routing.fakes import FixedIndex, FixedRegistry


class Api:
    """The endpoints of one selector, called with values."""

    def __init__(
        self, *instances: InstanceView, policy: Policy = Policy.CAR, index: FixedIndex | None = None
    ):
        self.selector = Selector(Settings(policy=policy), FixedRegistry(*instances), index)
        self._select = select_endpoint(self.selector, max_query_tokens=1000)
        self._progress = progress_endpoint(self.selector)

    def select_raw(self, body: Any) -> Response:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return self._select(Request("POST", "/v1/internal/routing/select", raw))

    def select(self, **body: Any) -> dict[str, Any]:
        response = self.select_raw({"token_ids": [1, 2, 3, 4], **body})
        assert response.status == 200
        found: dict[str, Any] = orjson.loads(response.body)
        return found

    def progress(self, request_id: str, body: Any) -> Response:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return self._progress(Request("POST", "/", raw, {"request_id": request_id}))


def refused(call, *args: Any) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value.status, caught.value.code, caught.value.message


GROUP = (
    instance("p:1", "PREFILL", order=0, waiting=2),
    instance("q:1", "PREFILL", order=1, waiting=4),
    instance("d:1", "DECODE", order=2, waiting=1, usage=0.25, incarnation="life-d"),
)


def test_car_answer_has_the_scores():
    api = Api(*GROUP, index=FixedIndex([match("p:1", device=2), match("q:1")]))
    answer = api.select(request_id="r-1")
    assert answer.pop("decision_id")
    assert answer == {
        "request_id": "r-1",
        "policy": "CAR",
        "prefill": {
            "instance_name": "p:1",
            "incarnation_id": "life-1",
            "score": 0.5,
            "kv_hit_ratio": 0.5,
            "queue_cost": 0.5,
        },
        "decode": {"instance_name": "d:1", "incarnation_id": "life-d", "score": 1.25},
        "predicted_hit_tokens": 2,
    }


@pytest.mark.parametrize("policy", [Policy.RR, Policy.SLO_AWARE])
def test_scores_are_null_outside_car(policy):
    answer = Api(*GROUP, policy=policy, index=FixedIndex([match("p:1", device=2)])).select()
    assert answer["policy"] == policy
    assert answer["prefill"] == {
        "instance_name": "p:1",
        "incarnation_id": "life-1",
        "score": None,
        "kv_hit_ratio": None,
        "queue_cost": None,
    }
    assert answer["decode"]["score"] is None


def test_decode_is_null_when_a_default_serves_alone():
    answer = Api(instance("x:1", incarnation=None)).select()
    assert answer["decode"] is None
    assert answer["prefill"]["incarnation_id"] is None


def test_empty_prompt_is_routed():
    answer = Api(*GROUP, policy=Policy.SLO_AWARE).select(token_ids=[])
    assert answer["prefill"]["instance_name"] == "p:1"
    assert answer["policy"] == "SLO_AWARE"


def test_request_id_is_returned_or_made():
    api = Api(*GROUP)
    assert api.select(request_id="chat-1.2_3~4 ü")["request_id"] == "chat-1.2_3~4 ü"
    assert api.select()["request_id"]
    assert api.select(request_id=None)["request_id"]


def test_explain_lists_every_candidate_and_every_exclusion():
    api = Api(
        *GROUP,
        instance("s:1", state=HealthState.SUSPECT),
        instance("n:1", waiting=None),
        index=FixedIndex([match("p:1", device=2, host=1), match("q:1", synchronized=False)]),
    )
    answer = api.select(explain=True)
    rows = {row["instance_name"]: row for row in answer["candidates"]}
    assert rows.keys() == {"p:1", "q:1", "d:1"}
    assert rows["p:1"]["chosen"]
    assert rows["p:1"]["score"] == answer["prefill"]["score"]
    assert rows["p:1"]["load"] == {"waiting_requests_num": 2, "gpu_cache_usage_perc": 0.0, "valid": True}
    assert rows["p:1"]["ranks"] == [
        {
            "dp_rank": 0,
            "synchronized": True,
            "device_hit_tokens": 2,
            "host_only_hit_tokens": 1,
            "ignored": None,
        }
    ]
    assert rows["q:1"]["ranks"][0]["ignored"] == "unsynchronized"
    assert rows["q:1"]["kv_hit_ratio"] == 0.0
    assert rows["d:1"]["side"] == "decode"
    assert {item["instance_name"]: item["code"] for item in answer["excluded"]} == {
        "s:1": "suspect",
        "n:1": "no_load",
    }
    assert answer["explanation"]["longest_queue"] == {"prefill": 4, "decode": 1}
    assert answer["explanation"]["settings"]["car_prefill_lambda"] == 0.5
    assert "candidates" not in api.select()


def test_explanation_names_missing_ranks_without_enumerating_absurd_ones():
    api = Api(instance("a:1", dp_size=2**60), index=FixedIndex([match("a:1", 1, device=4)]))
    (row,) = api.select(explain=True)["candidates"]
    assert row["missing_ranks"][:3] == [0, 2, 3]
    assert len(row["missing_ranks"]) <= 16


def test_explanation_says_why_hits_do_not_count():
    reasons = {}
    for identity, stream in ((None, None), ("life-1", None), ("life-1", "life-0"), ("life-1", "life-1")):
        found = match("a:1", device=4, incarnation=stream)
        answer = Api(instance("a:1", incarnation=identity), index=FixedIndex([found])).select(explain=True)
        reasons[identity, stream] = answer["candidates"][0]["ranks"][0]["ignored"]
    assert reasons == {
        (None, None): "the instance has neither incarnation nor registration time",
        ("life-1", None): "static stream: it does not say which process it belongs to",
        ("life-1", "life-0"): "the stream belongs to another incarnation",
        ("life-1", "life-1"): None,
    }


def test_nonsense_load_does_not_break_the_answer():
    api = Api(
        instance("a:1", waiting=2**80, usage=0.5),
        instance("b:1", usage=float("nan")),
        instance("c:1", usage=float("inf")),
    )
    answer = api.select(explain=True)
    assert answer["prefill"]["instance_name"] == "a:1"
    assert answer["candidates"][0]["load"]["waiting_requests_num"] == str(2**80)
    assert {item["instance_name"] for item in answer["excluded"]} == {"b:1", "c:1"}
    assert all("nan" in item["message"] or "inf" in item["message"] for item in answer["excluded"])


# Refusals


def test_no_candidates_gives_the_reason_of_each_instance():
    api = Api(instance("p:1", "PREFILL"), instance("s:1", state=HealthState.SUSPECT))
    response = api.select_raw({"token_ids": [1]})
    answer = orjson.loads(response.body)
    assert response.status == 503
    assert answer["error"]["code"] == "no_candidates"
    assert answer["error"]["message"].startswith("no decode instance can be chosen: ")
    assert "p:1: it is PREFILL and needs a decode instance" in answer["error"]["message"]
    assert "s:1: it is SUSPECT" in answer["error"]["message"]
    assert {item["instance_name"]: item["code"] for item in answer["excluded"]} == {
        "p:1": "no_decode",
        "s:1": "suspect",
    }


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(
    ("instances", "missing"),
    [
        ([instance("p:1", "PREFILL")], "no decode instance can be chosen"),
        ([instance("d:1", "DECODE")], "no prefill instance can be chosen"),
        (
            [instance("p:1", "PREFILL", state=HealthState.SUSPECT), instance("d:1", "DECODE", order=1)],
            "no prefill instance can be chosen",
        ),
        (
            [instance("p:1", "PREFILL"), instance("d:1", "DECODE", order=1, state=HealthState.SUSPECT)],
            "no decode instance can be chosen",
        ),
        ([instance("a:1", state=HealthState.SUSPECT)], "no instance can be chosen"),
    ],
)
def test_no_candidates_says_what_is_missing(instances, missing, policy):
    api = Api(*instances, policy=policy)
    answer = orjson.loads(api.select_raw({"token_ids": [1], "explain": True}).body)
    assert answer["error"]["message"].startswith(f"{missing}: ")
    decision = api.selector.preview(b"\1\0\0\0")
    assert decision.reason == missing


def test_no_candidates_sentence_stays_short_with_many_instances():
    api = Api(*(instance(f"i{number}:1", waiting=None) for number in range(50)))
    answer = orjson.loads(api.select_raw({"token_ids": []}).body)
    assert answer["error"]["message"].endswith("and 40 more")
    assert len(answer["excluded"]) == 50


def test_no_instances_at_all():
    answer = orjson.loads(Api().select_raw({"token_ids": []}).body)
    assert answer["error"] == {"code": "no_candidates", "message": "no instance is registered"}


def test_open_request_id_is_a_conflict_until_it_ends():
    api = Api(*GROUP)
    api.select(request_id="r")
    status, code, message = refused(api.select_raw, {"token_ids": [1], "request_id": "r"})
    assert (status, code) == (409, "request_open")
    assert "request_id" in message
    assert api.progress("r", {"action": "CANCEL"}).status == 204
    api.select(request_id="r")


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        ({}, 400, "token_ids"),
        ({"token_ids": "1"}, 400, "token_ids"),
        ({"token_ids": [1, -1]}, 400, "token_ids[1]"),
        ({"token_ids": [True]}, 400, "token_ids[0]"),
        ({"token_ids": [1.0]}, 400, "token_ids[0]"),
        ({"token_ids": [2**31]}, 400, "token_ids[0]"),
        ({"token_ids": [1] * 1001}, 413, "token_ids"),
        ({"token_ids": [], "request_id": 5}, 400, "request_id"),
        ({"token_ids": [], "request_id": ""}, 400, "request_id"),
        ({"token_ids": [], "request_id": "x" * 257}, 400, "request_id"),
        ({"token_ids": [], "request_id": "a/b"}, 400, "request_id"),
        ({"token_ids": [], "request_id": "a\nb"}, 400, "request_id"),
        ({"token_ids": [], "request_id": "."}, 400, "request_id"),
        ({"token_ids": [], "request_id": ".."}, 400, "request_id"),
        ({"token_ids": [], "explain": 1}, 400, "explain"),
    ],
)
def test_bad_select_names_the_field(body, status, names):
    found, _, message = refused(Api(*GROUP).select_raw, body)
    assert found == status
    assert names in message


def test_fields_of_a_newer_gateway_are_ignored():
    assert Api(*GROUP).select(model="m", priority=3)["prefill"]
    api = Api(*GROUP)
    api.select(request_id="r")
    assert api.progress("r", {"action": "GENERATE", "finish_reason": "stop"}).status == 204


# Progress


def test_progress_is_accepted_without_content_and_repetition_is_harmless():
    api = Api(*GROUP)
    api.select(request_id="r")
    for action in ("FINISH_PREFILL", "GENERATE", "FINISH_DECODE", "FINISH_DECODE", "CANCEL"):
        response = api.progress("r", {"action": action})
        assert (response.status, response.body) == (204, b"")
    assert api.selector.open_request_num() == 0


@pytest.mark.parametrize("policy", list(Policy))
def test_progress_is_accepted_under_every_policy(policy):
    api = Api(*GROUP, policy=policy)
    api.select(request_id="r")
    assert api.progress("r", {"action": "GENERATE", "num_generated_tokens": 5}).status == 204
    assert api.selector.counts()["d:1"].decode_token_num == 9


def test_cached_tokens_reach_the_comparison():
    api = Api(*GROUP, index=FixedIndex([match("p:1", device=2), match("q:1")]))
    api.select(request_id="r")
    api.progress("r", {"action": "FINISH_DECODE", "cached_tokens": 3})
    (errors,) = api.selector.errors.read()
    assert (errors.instance_name, errors.error_sum) == ("p:1", -1)


def test_unknown_request_is_not_found():
    status, code, message = refused(Api(*GROUP).progress, "nobody", {"action": "GENERATE"})
    assert (status, code) == (404, "unknown_request")
    assert "600 s" in message


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        ({}, "action"),
        ({"action": "DONE"}, "FINISH_PREFILL, GENERATE, FINISH_DECODE, CANCEL"),
        ({"action": 5}, "action"),
        ({"action": "GENERATE", "num_generated_tokens": -1}, "num_generated_tokens"),
        ({"action": "GENERATE", "num_generated_tokens": 1.5}, "num_generated_tokens"),
        ({"action": "GENERATE", "num_generated_tokens": True}, "num_generated_tokens"),
        ({"action": "GENERATE", "cached_tokens": "5"}, "cached_tokens"),
        ({"action": "GENERATE", "cached_tokens": 2**31}, "cached_tokens"),
    ],
)
def test_bad_progress_names_the_field_and_changes_nothing(body, names):
    api = Api(*GROUP)
    api.select(request_id="r")
    before = api.selector.counts()
    status, _, message = refused(api.progress, "r", body)
    assert status == 400
    assert names in message
    assert api.selector.counts() == before
