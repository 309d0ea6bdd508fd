"""A stand-in for a gateway: asks the portal where prompts should go, and reports what the engine held.

    .venv/bin/python -m scripts.demo_gateway http://127.0.0.1:8888 [--rate 5]

Prompts are the simulated engines' own popular ones, some with a new question behind them; what is reported
as `cached_tokens` is what the chosen engine really holds of the prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

SUFFIX_TOKENS = 300


def call(url: str, body: object = None) -> Any:
    """GET, or POST of JSON; the answer's JSON, None for an empty one. Raises OSError, and HTTPException
    for an answer that breaks off."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urlopen(request, timeout=5) as answer:  # noqa: S310
        text = answer.read()
    return json.loads(text) if text else None


def popular(engine: str) -> list[dict[str, Any]]:
    """The popular prompts of an engine, with what its rank 0 holds of each."""
    prompts = call(f"http://{engine}/prompts")["prompts"]
    return [{"token_ids": each["token_ids"], **each["ranks"][0]} for each in prompts]


def route_one(portal: str, rng: random.Random) -> None:
    """Let the portal decide on one request and report its end."""
    names = [each["name"] for each in call(f"{portal}/v1/internal/instances")["instances"]]
    if not names:
        return
    prompts = popular(rng.choice(names))
    number = min(int(rng.expovariate(0.5)), len(prompts) - 1)
    question = [rng.randrange(1000) for _ in range(rng.choice((0, SUFFIX_TOKENS)))]
    token_ids = prompts[number]["token_ids"] + question
    decision = call(f"{portal}/v1/internal/routing/select", {"token_ids": token_ids})
    held = popular(decision["prefill"]["instance_name"])[number]
    cached = held["device_hit_tokens"] + held["host_only_hit_tokens"]
    report = f"{portal}/v1/internal/routing/requests/{decision['request_id']}/progress"
    call(report, {"action": "FINISH_DECODE", "cached_tokens": cached})


def main() -> None:
    parser = argparse.ArgumentParser(description="Route simulated requests through the portal.")
    parser.add_argument("portal", help="its address, such as http://127.0.0.1:8888")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    options = parser.parse_args()
    rng = random.Random()
    while True:
        try:
            route_one(options.portal.rstrip("/"), rng)
        except (OSError, HTTPException):
            time.sleep(1.0)  # The portal or an engine is starting or stopping, maybe in an answer's middle.
        time.sleep(rng.expovariate(options.rate))


if __name__ == "__main__":
    main()
