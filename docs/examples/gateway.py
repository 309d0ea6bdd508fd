# ruff: noqa: S310
"""A gateway in a few lines: ask who should serve, let it serve, report how it went."""

import json
import os
import urllib.request

PORTAL = os.environ.get("KVPORTAL_URL", "http://127.0.0.1:8888") + "/v1/internal/routing/"
TOKEN = {"X-Internal-Token": os.environ.get("KVPORTAL_INTERNAL_API_TOKEN", "")}


def post(url: str, body: dict, headers: dict) -> dict:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


def complete(prompt: str, token_ids: list[int]) -> dict:
    """Serve one prompt. `chosen["decode"]`, if any, is handed on as your engines expect it."""
    chosen = post(PORTAL + "select", {"token_ids": token_ids}, TOKEN)
    report = f"{PORTAL}requests/{chosen['request_id']}/progress"
    try:
        answer = post(f"http://{chosen['prefill']['instance_name']}/v1/completions", {"prompt": prompt}, {})
    except OSError:
        post(report, {"action": "CANCEL"}, TOKEN)
        raise
    cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens")
    post(report, {"action": "FINISH_DECODE", "cached_tokens": cached}, TOKEN)
    return answer
