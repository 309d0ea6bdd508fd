from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from kvportal.explorer import explored
from streams import console
from streams.index import BlockHoldings
from streams.prompt_text import MAX_TOKEN_ID, MAX_TOKENS, PromptTextError, parse_prompt
from streams.status import Match
from tests.admin.values import GAP, spec

URL = "/admin/streams/stream/explore/"


def tokens(text: str) -> list[int]:
    return [int(value) for value in np.frombuffer(parse_prompt(text), "<u4")]


@pytest.mark.parametrize(
    "text",
    [
        "1, 2, 3",
        "1 2 3",
        "1\n2\n3\n",
        "1;2;3,",
        "[1, 2, 3]",
        "  [1,2,3]  ",
        '{"token_ids": [1, 2, 3]}',
        '{"request_id": "x", "token_ids": [1, 2, 3]}',
    ],
)
def test_token_ids_are_read_however_they_are_written(text: str) -> None:
    assert tokens(text) == [1, 2, 3]


def test_extremes_are_taken() -> None:
    assert tokens(f"0 {MAX_TOKEN_ID}") == [0, MAX_TOKEN_ID]
    assert len(tokens(" ".join(["7"] * MAX_TOKENS))) == MAX_TOKENS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Nothing to look up"),
        (" \n ", "Nothing to look up"),
        ("[]", "is empty"),
        (",;,", "is empty"),
        ("The quick brown fox", "Item 1 is “The”. Token IDs are whole numbers"),
        ("1 2 three", "Item 3 is “three”"),
        ("1, -2", "Item 2 is “-2”"),
        ("1, 2.0", "Item 2 is “2.0”"),
        ("[1, true]", "Item 2 is true"),
        ("[1, null]", "Item 2 is null"),
        ("[1, 2.0]", "Item 2 is 2.0"),
        ('[1, "2"]', "Item 2 is “2”"),
        (f"{MAX_TOKEN_ID + 1}", "from 0 to 2,147,483,647"),
        ("9" * 5000, "Item 1 is “9999"),
        ("[1, 2", "starts like JSON and is not"),
        ("[" * 100_000, "starts like JSON and is not"),
        ('{"tokens": [1]}', "has no list of token IDs"),
        ('{"token_ids": 5}', "has no list of token IDs"),
        (" ".join(["7"] * (MAX_TOKENS + 1)), "262,145 token IDs; at most 262,144"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(PromptTextError) as caught:
        parse_prompt(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


def test_blocks_become_runs_and_numbers_stay_those_of_the_query() -> None:
    held = Match(spec(1), True, 9, 256, 128, 50, 50, None)
    lost = Match(spec(2), False, None, 0, 0, 0, 0, GAP)
    shows = explored(
        bytes(4 * 700), [held, lost], [BlockHoldings(spec(1), "DBH-D", None), BlockHoldings(spec(2), "", GAP)]
    )
    assert shows["tokens"] == 700
    first, second = shows["streams"]
    assert first["runs"] == [["D", 1], ["B", 1], ["H", 1], ["-", 1], ["D", 1]]
    assert (first["device_hit_tokens"], first["host_only_hit_tokens"]) == (256, 128)
    assert first["reusable_prefix_tokens"] == 384
    assert second["runs"] == []
    assert second["error"] == str(GAP)


# ---- the page


class FakeConsole(console.DetachedConsole):
    def __init__(self) -> None:
        self.prompts: list[bytes] = []

    def explore(self, prompt: bytes) -> Any:
        self.prompts.append(prompt)
        return {"tokens": len(prompt) // 4, "streams": [], "routing": None}


@pytest.fixture
def portal() -> Iterator[FakeConsole]:
    own = FakeConsole()
    console.install(own)
    yield own
    console.install(None)


@pytest.fixture
def viewer(db: None) -> Client:
    user = User.objects.create(username="pat", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_stream"))
    client = Client()
    client.force_login(user)
    return client


def look_up(client: Client, text: str | bytes) -> Any:
    return client.post(URL, text, content_type="text/plain")


def test_tokens_are_looked_up(viewer: Client, portal: FakeConsole) -> None:
    assert look_up(viewer, "1 2 3").json() == {"tokens": 3, "streams": [], "routing": None}
    assert portal.prompts == [np.array([1, 2, 3], "<u4").tobytes()]


@pytest.mark.parametrize("text", ["hello", b"\xff\xfe", "9 " * 3_000_000])
def test_what_is_not_a_prompt_is_answered_kindly(viewer: Client, portal: FakeConsole, text: Any) -> None:
    answer = look_up(viewer, text)
    assert answer.status_code == 200
    assert answer.json()["error"]
    assert portal.prompts == []


def test_without_an_index_the_page_says_so(viewer: Client) -> None:
    answer = look_up(viewer, "1 2 3")
    assert answer.status_code == 503
    assert "no index" in answer.json()["error"]


def test_explorer_needs_the_permission(portal: FakeConsole, db: None) -> None:
    client = Client()
    client.force_login(User.objects.create(username="bare", is_staff=True))
    assert client.get("/admin/streams/stream/explorer/").status_code == 403
    assert look_up(client, "1 2 3").status_code == 403
    assert portal.prompts == []


def test_token_ids_are_not_logged(
    viewer: Client, portal: FakeConsole, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    look_up(viewer, "40961 40962 40963")
    look_up(viewer, json.dumps([40961, "secret"]))
    assert "40961" not in caplog.text
    assert "secret" not in caplog.text
