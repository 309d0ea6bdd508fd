"""The way between replicas: quiet for long, and away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from channels.layers import get_channel_layer
from django.test import override_settings

from kvportal.commands import GROUP
from kvportal.config.site import load_site
from kvportal.live import Live
from tests.admin.test_consumer import connect, person, portal, source
from tests.instances.support import closed_port
from tests.support.processes import RedisServer

__all__ = ["portal", "source"]  # fixtures

LONGER_THAN_REDIS_IS_ASKED_TO_WAIT = 6.5


def layer_at(url: str, data_dir: Path) -> override_settings:
    site = load_site({"KVPORTAL_REDIS_URL": url, "KVPORTAL_DATA_DIR": str(data_dir)})
    return override_settings(CHANNEL_LAYERS={"default": site.channel_layer})


async def test_a_replica_that_hears_nothing_for_long_still_listens(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with layer_at(redis_server.url, tmp_path / "site"):
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(GROUP, channel)
        listening = asyncio.create_task(layer.receive(channel))
        await asyncio.wait([listening], timeout=LONGER_THAN_REDIS_IS_ASKED_TO_WAIT)
        assert not listening.done(), "the wait itself has failed"
        await layer.group_send(GROUP, {"type": "order"})
        assert (await asyncio.wait_for(listening, 30))["type"] == "order"
        await layer.flush()
        await layer.close_pools()


@pytest.fixture
def nothing_at_redis(tmp_path: Path) -> Iterator[None]:
    with closed_port() as port, layer_at(f"redis://127.0.0.1:{port}/0", tmp_path / "site"):
        yield


@pytest.mark.django_db(transaction=True)
async def test_a_page_does_not_need_the_way_between_replicas(portal: Live, nothing_at_redis: None) -> None:
    page, accepted, _ = await connect(await person())
    assert accepted
    for _ in range(3):
        state = json.loads(await page.receive_from())
        await page.send_to(json.dumps({"type": "ack", "version": state["version"]}))
        await page.send_to(json.dumps({"type": "full"}))
    await page.disconnect()
