"""One system prompt for everybody: its blocks are reused, and still no engine gets all the traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import pytest
from pagefleet_protocol import metric_names

from e2e.fleet_process import PATIENCE_S, SERVICE, FleetProcess
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet

RULES = "Answer in one sentence. Name the part of the fleet that you speak of. Do not guess: say when you do not know. "
NUM_REQUESTS = 96


def test_shared_system_prompt_is_cached_on_both_engines(fleet: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    system = {"role": "system", "content": RULES * 10}

    async def scenario() -> Counter[str]:
        at_once = asyncio.Semaphore(16)

        async def one(exchange: Exchange) -> str:
            body = {"model": SERVICE, "messages": [system, *exchange.messages], "temperature": 0, "max_tokens": 16}
            async with at_once:
                reply = await http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            engine: str = reply.headers["x-pagefleet-engine"]
            return engine

        async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE_S) as http:
            return Counter(await asyncio.gather(*(one(exchange) for exchange in exchanges[:NUM_REQUESTS])))

    # What an engine was sent in the minute before, by other tests, keeps the prefix away from it for a while.
    have_it: set[str] = set()
    before: dict[str, Mapping[str, float]] = {}

    def both_have_it_and_serve() -> bool:
        nonlocal before
        before, had_it = fleet.engine_metrics(), len(have_it)
        served = asyncio.run(scenario())
        have_it.update(served)
        return had_it == len(served) == 2 and min(served.values()) > NUM_REQUESTS / 8

    fleet.until(both_have_it_and_serve)
    after = fleet.engine_metrics()
    for engine in have_it:
        gained = {
            name: after[engine][name] - before[engine][name]
            for name in (
                metric_names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS,
                metric_names.ENGINE_PREFIX_CACHE_HITS_TOKENS,
            )
        }
        queries, hits = gained.values()
        assert hits > 0.7 * queries
