"""The routing lab: what it says other weights would do is what a portal with those weights answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from routing import console
from routing.decision_log import DecisionLog, Written
from routing.decision_store import DecisionStore
from routing.endpoints import select_endpoint
from routing.instances.model import InstanceView
from routing.lab import Kept, effect, per_instance, rejudge, rejudge_all, sweep
from routing.policies.decision import Policy, Settings
from routing.prediction_errors import Comparison
from routing.selector import NoCandidatesError, Selector
from streams.http import Request
from tests.admin.test_pages import signed_in, text_of
from tests.routing.builders import instance, match
from tests.routing.fakes import FixedIndex, FixedRegistry

LAB = "/admin/routing/decision/lab/"
FIND = "/admin/routing/decision/find/"
PROMPT_OF = "/admin/routing/decision/prompt/"
TOKENS = 1024
PROMPT = bytes(4 * TOKENS)
HALF = Settings(policy=Policy.CAR)
CACHE_ONLY = replace(HALF, car_prefill_lambda=1.0)
QUEUE_ONLY = replace(HALF, car_prefill_lambda=0.0)

HOLDER_AND_IDLE = (
    instance("holder:1", order=0, waiting=4),
    instance("idle:1", order=1, waiting=1),
)
HELD = (match("holder:1", device=256, host=256), match("idle:1"))


def portal(
    views: Sequence[InstanceView], matches: Sequence[Any], settings: Settings, *, share: float = 1.0
) -> Selector:
    log = DecisionLog(explain_share=share)
    return Selector(settings, FixedRegistry(*views), FixedIndex(matches), log)


def kept(selector: Selector) -> list[Kept]:
    return [Kept(r.decision_id, r.at, r.explanation) for r in selector.decisions.recent() if r.full]


def chance(seed: int) -> tuple[list[InstanceView], list[Any]]:
    """A group of some size with some loads, and what it holds of the prompt."""
    rng = random.Random(seed)
    roles = rng.choice((["DEFAULT"], ["PREFILL", "DECODE", "MIX"], ["DEFAULT", "PREFILL", "DECODE"]))
    views, matches = [], []
    for order in range(rng.randint(1, 12)):
        ranks = rng.choice((1, 1, 2))
        views.append(
            instance(
                f"i{order}:1",
                rng.choice(roles),
                current=None,
                order=order,
                waiting=rng.choice((None, 0, 1, 7, 40)),
                usage=rng.random(),
                dp_size=ranks,
            )
        )
        matches += [
            match(
                f"i{order}:1",
                rank,
                device=rng.randrange(0, 600),
                host=rng.randrange(0, 600),
                synchronized=rng.random() > 0.1,
            )
            for rank in range(ranks)
        ]
    return [replace(v, current_role="PREFILL") if v.role == "MIX" else v for v in views], matches


def api_answer(selector: Selector) -> dict[str, Any]:
    """What `POST /v1/internal/routing/select` of that portal says."""
    body = orjson.dumps({"token_ids": [0] * TOKENS})
    endpoint = select_endpoint(selector, max_query_tokens=TOKENS)
    return orjson.loads(endpoint(Request("POST", "/v1/internal/routing/select", body)).body)


@pytest.mark.parametrize("before", [Policy.CAR, Policy.RR])
def test_lab_says_what_a_portal_with_the_other_weights_answers(before: Policy) -> None:
    compared = moved = 0
    for seed in range(200):
        views, matches = chance(seed)
        other = Settings(Policy.CAR, random.Random(seed).random(), random.Random(-seed).random())
        recording = portal(views, matches, replace(HALF, policy=before))
        with suppress(NoCandidatesError):
            recording.select(PROMPT)
        answer = api_answer(portal(views, matches, other))
        # Through JSON, as the database keeps it.
        record = kept(recording)[0]
        told = Kept(record.decision_id, record.at, orjson.loads(orjson.dumps(dict(record.explanation))))
        found = rejudge(told, other)
        if record.explanation["candidates_num"]["prefill"] == 0 or "error" in answer:
            assert found is None, seed
            continue
        assert found is not None, seed
        for name in ("score", "kv_hit_ratio", "queue_cost"):
            assert getattr(found.after, name) == answer["prefill"][name], (seed, name)
        # Among equals the recorded choice stays, so that a tie is no change; the score is the same.
        if found.after.prefill != answer["prefill"]["instance_name"]:
            assert found.after.prefill == found.before.prefill, seed
        else:
            assert found.after.hit_tokens == answer["predicted_hit_tokens"], seed
        assert (found.after.decode is None) == (answer["decode"] is None), seed
        compared += 1
        moved += found.moved
    assert compared > 100
    assert moved > 20


def test_effect_is_told_in_tokens_and_requests() -> None:
    selector = portal(HOLDER_AND_IDLE, HELD, CACHE_ONLY)
    for _ in range(3):
        selector.select(PROMPT)
    rejudged = rejudge_all(kept(selector), QUEUE_ONLY)
    before, after = effect(rejudged, after=False), effect(rejudged, after=True)
    assert [one.moved for one in rejudged] == [True] * 3
    assert (before.device_tokens, before.host_tokens, before.hit_share) == (768, 768, 0.5)
    assert (after.device_tokens, after.host_tokens, after.hit_share) == (0, 0, 0.0)
    assert (before.mean_waiting, after.mean_waiting) == (4.0, 1.0)
    assert per_instance(rejudged) == [("holder:1", 3, 0), ("idle:1", 0, 3)]


def test_sweep_goes_from_the_queue_to_the_cache() -> None:
    selector = portal(HOLDER_AND_IDLE, HELD, CACHE_ONLY)
    selector.select(PROMPT)
    steps = sweep(kept(selector), HALF)
    assert [step.car_prefill_lambda for step in steps] == [n / 10 for n in range(11)]
    assert (steps[0].moved, steps[-1].moved) == (1, 0)
    shares = [step.effect.hit_share for step in steps]
    assert shares == sorted(shares)


# ---- the page


@pytest.fixture
def serving() -> Iterator[Any]:
    """Offers a portal to the admin."""

    def offer(selector: Selector) -> Selector:
        console.install(SimpleNamespace(decisions=selector.decisions, selector=selector))  # type: ignore[arg-type]
        return selector

    yield offer
    console.install(None)


@pytest.fixture
def viewer(db: None) -> Client:
    return signed_in("view_decision")


def test_empty_lab_says_what_to_do(viewer: Client, serving: Any) -> None:
    assert "This process routes nothing" in text_of(viewer.get(LAB))
    serving(portal(HOLDER_AND_IDLE, HELD, HALF, share=0.0)).select(PROMPT)
    page = text_of(viewer.get(LAB))
    assert "No decision with all its candidates is recorded yet" in page
    assert "KVPORTAL_DECISION_EXPLAIN_SHARE" in page
    assert "No engine&#x27;s report has been compared yet" in page or "No engine's report" in page


def test_lab_shows_what_would_have_gone_elsewhere(viewer: Client, serving: Any) -> None:
    selector = serving(portal(HOLDER_AND_IDLE, HELD, CACHE_ONLY))
    chosen = selector.select(PROMPT)
    assert "The decision would have stayed where it went" in text_of(viewer.get(LAB))
    page = text_of(viewer.get(LAB, {"lambda": "0", "host_weight": "1", "newest": "50"}))
    assert "1 of 1 decision would" in page
    assert f'data-decision="{chosen.decision_id}"' in page
    assert "512 → 0" in page
    assert "4 → 1" in page
    assert "−50.0 points" in page


def test_lab_takes_decisions_from_the_database_once(viewer: Client, serving: Any) -> None:
    selector = serving(portal(HOLDER_AND_IDLE, HELD, CACHE_ONLY))
    selector.select(PROMPT)
    records = selector.decisions.recent()
    DecisionStore().write([Written(record) for record in records])
    assert "Of 1 decision<" in text_of(viewer.get(LAB))
    console.install(None)
    assert "Of 1 decision<" in text_of(viewer.get(LAB))
    with CaptureQueriesContext(
        connection,
    ) as few:
        viewer.get(LAB)
    DecisionStore().write([Written(replace(records[0], decision_id=f"{n:032}")) for n in range(60)])
    with CaptureQueriesContext(connection) as many:
        assert "Of 61 decisions<" in text_of(viewer.get(LAB))
    assert len(many) == len(few)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"lambda": "abc"}, "Lambda is “abc”; it must be a number from 0 to 1"),
        ({"lambda": "nan"}, "Lambda is “nan”"),
        ({"host_weight": "1.5"}, "Host weight is “1.5”; it must be a number from 0 to 1"),
        ({"newest": "7"}, "must be one of 50, 200, 1000"),
        ({"lambda": "<script>"}, "Lambda is “&lt;script&gt;”"),
    ],
)
def test_weights_that_are_none_are_named(viewer: Client, serving: Any, query: Any, words: str) -> None:
    serving(portal(HOLDER_AND_IDLE, HELD, HALF)).select(PROMPT)
    assert words in text_of(viewer.get(LAB, query))


def test_decisions_without_loads_cannot_be_scored(viewer: Client, serving: Any) -> None:
    views = [replace(view, load=None) for view in HOLDER_AND_IDLE]
    selector = portal(views, HELD, replace(HALF, policy=Policy.RR))
    serving(selector).select(PROMPT)
    assert "The one recorded decision cannot be scored by CAR" in text_of(viewer.get(LAB))
    selector.select(PROMPT)
    assert "None of the 2 recorded decisions can be scored by CAR" in text_of(viewer.get(LAB))


def test_prediction_errors_are_shown_by_instance(viewer: Client, serving: Any) -> None:
    selector = serving(portal(HOLDER_AND_IDLE, HELD, HALF))
    for predicted, cached in ((512, 512), (512, 256), (100, 200)):
        selector.errors.observe("holder:1", Comparison(1.0, predicted, cached))
    selector.errors.observe("idle:1", Comparison(1.0, 0, 128))
    page = text_of(viewer.get(LAB))
    assert "found less than predicted" in page
    assert "found more than predicted" in page
    assert "Last 3 errors, from -100 to +256 tokens" in page


def test_decision_that_is_not_in_the_database_is_explained_from_memory(viewer: Client, serving: Any) -> None:
    selector = serving(portal(HOLDER_AND_IDLE, HELD, HALF))
    chosen = selector.select(PROMPT, "request-7").decision_id
    page = text_of(viewer.get(FIND, {"id": chosen}))
    assert "Shown from memory" in page
    assert "request-7" in page
    assert "hit ratio 0.375" in page
    DecisionStore().write([Written(record) for record in selector.decisions.recent()])
    found = viewer.get(FIND, {"id": chosen}, follow=True)
    assert found.redirect_chain[0][0].endswith("/change/")
    assert "Shown from memory" not in text_of(found)
    assert "is neither in the database nor among the latest" in text_of(
        viewer.get(FIND, {"id": "unknown"}, follow=True)
    )


def test_recorded_prompt_leads_to_the_explorer_for_those_who_may_read_it(serving: Any, db: None) -> None:
    selector = serving(portal(HOLDER_AND_IDLE, HELD, HALF))
    with_prompt, without = (selector.select(PROMPT).decision_id for _ in range(2))
    prompts = {with_prompt: (7).to_bytes(4, "little") + (2**31 - 1).to_bytes(4, "little")}
    records = selector.decisions.recent()
    DecisionStore().write([Written(record, prompts.get(record.decision_id)) for record in records])
    link = f"/admin/streams/stream/explorer/?decision={with_prompt}"
    reader = signed_in("view_decision", "view_stream", "view_recordedprompt")
    assert link in text_of(reader.get(FIND, {"id": with_prompt}, follow=True))
    assert "explorer/?decision=" not in text_of(reader.get(FIND, {"id": without}, follow=True))
    answer = reader.get(PROMPT_OF, {"id": with_prompt})
    assert answer.json() == {"token_ids": [7, 2**31 - 1]}
    assert "no-store" in answer.headers["Cache-Control"]
    missing = reader.get(PROMPT_OF, {"id": without})
    assert missing.status_code == 404
    assert "No prompt is recorded" in missing.json()["error"]
    User.objects.get().user_permissions.remove(Permission.objects.get(codename="view_recordedprompt"))
    assert "explorer/?decision=" not in text_of(reader.get(FIND, {"id": with_prompt}, follow=True))
    refused = reader.get(PROMPT_OF, {"id": with_prompt})
    assert refused.status_code == 403
    assert "may not read recorded prompts" in refused.json()["error"]


def test_lab_is_for_those_who_may_view_decisions(db: None) -> None:
    stranger = signed_in("view_stream")
    assert stranger.get(LAB).status_code == 403
    assert stranger.get(FIND, {"id": "x"}).status_code == 403
