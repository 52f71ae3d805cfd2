"""A model that has to be downloaded first: from a hub on the loopback, by the fleet, into the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.fleet_process import PATIENCE_S, FleetProcess
from tests.fakes.hub_server import HubServer, Repository
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
TINY = Path(__file__).parents[1] / "engine" / "pagefleet_engine" / "builtin" / "tiny"


def test_a_model_of_a_hub_is_downloaded_once_and_answers_under_every_name(
    tmp_path: Path, exchanges: Sequence[Exchange]
) -> None:
    repository = Repository()
    repository.commit({file.name: file.read_bytes() for file in TINY.iterdir() if file.is_file()})
    with HubServer() as hub:
        hub.repositories["pagefleet/tiny"] = repository
        model = {"uri": "hf://pagefleet/tiny", "endpoint": hub.url, "name": "pagefleet/tiny", "aliases": ["best"]}
        with FleetProcess(tmp_path, model=model, replicas=1) as fleet:
            fleet.until(lambda: fleet.serves(1))
            exchange = exchanges[0]
            for name in ("pagefleet/tiny", "best"):
                assert asyncio.run(answer(fleet.url, name, exchange)) == exchange.answer
            asked = len(hub.requests_for("/resolve/"))
            fleet.edit(model=model, replicas=2)
            fleet.until(lambda: fleet.serves(2))
            assert len(hub.requests_for("/resolve/")) == asked
            assert "the model is in" in fleet.output


async def answer(url: str, model: str, exchange: Exchange) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        messages: Any = exchange.messages
        reply = await client.chat.completions.create(model=model, messages=messages, temperature=0)
        return reply.choices[0].message.content or ""
