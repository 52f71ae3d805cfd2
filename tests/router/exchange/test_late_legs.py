"""A prefill leg that the answer went on without."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.exchange.exchange import Exchange

from tests.fakes.faulty_engine import post, silent, stream
from tests.fakes.pair_fleet import decode, id_of, long_chat, pair_fleet, prefill

PATIENCE_S = 60.0
EVENT = b'data: {"n": 1}\n\n'


@pytest.mark.parametrize("reads", [True, False])
def test_it_ends_though_its_engine_hangs_and_the_answer_goes_on(tmp_path: Path, reads: bool) -> None:
    async def scenario() -> None:
        roles = (prefill(silent), decode(stream((EVENT,) * 2, gap=PATIENCE_S)))
        async with asyncio.timeout(PATIENCE_S), pair_fleet(tmp_path, roles) as f:
            router = f.made.router
            client = await f.made.connect()
            await client.send(post(long_chat(stream=True)))
            await client.head()
            assert await client.chunk() == EVENT
            [exchange] = [one._responder for one in router.connections if isinstance(one._responder, Exchange)]
            if not reads:
                exchange.client_paused()
            p0 = router.table.engine(id_of(f, "p0"))
            assert p0 is not None
            await f.made.until(lambda: p0.tally.num_requests == 0 and not f.engine("p0").num_open)
            assert p0.tally.num_tokens == 0
            assert f.engine("d0").num_open == 1, "the answer goes on"
            assert router.metrics.failures.total() == 0, "it may not have been needed"
            client.close()

    uvloop.run(scenario())
