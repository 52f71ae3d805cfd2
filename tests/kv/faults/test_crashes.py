"""Engines that are killed, or frozen, in the middle of a transfer, and come back under their address."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.fakes.kv_pair import Pair
from tests.fakes.kv_serving import until

pytestmark = pytest.mark.fleet


def test_prefill_is_killed_midway_and_comes_back_under_its_address(pair: Pair) -> None:
    async def killed() -> None:
        async with pair.questions() as ask:
            refused, asked = ask(on_failure="fail"), await pair.midway(ask)
            pair.prefill.kill()
            assert await asked.num_passed() == 0
            reply = await refused.decode
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "kv_load_failed")
            # Dead before the transfer begins, and the router has not noticed.
            assert await ask().num_passed() == 0

    asyncio.run(killed())
    before = pair.prefill.facts
    pair.repair()
    assert pair.prefill.facts.incarnation != before.incarnation
    asyncio.run(pair.link())


def test_prefill_is_frozen_midway_and_goes_on(pair: Pair) -> None:
    async def frozen() -> None:
        async with pair.questions() as ask:
            asked = await pair.midway(ask)
            deaths = pair.decode.figure("peer_deaths_total")
            pair.prefill.freeze()
            try:
                assert await asked.num_passed() == 0
                await until(lambda: pair.decode.figure("peer_deaths_total") > deaths)
                await until(lambda: pair.decode.at_baseline)
            finally:
                pair.prefill.freeze(False)
                pair.data.arm("none")

    asyncio.run(frozen())
    asyncio.run(pair.link())


def test_decode_is_frozen_before_it_asks_and_goes_on(pair: Pair) -> None:
    async def frozen() -> None:
        async with pair.questions() as ask:
            expiries = pair.prefill.figure("lease_expiries_total")
            pair.decode.freeze()
            try:
                asked = ask()
                await until(lambda: pair.prefill.figure("lease_expiries_total") > expiries)
                await until(lambda: pair.prefill.at_baseline)
            finally:
                pair.decode.freeze(False)
            assert await asked.num_passed() == 0

    asyncio.run(frozen())
    asyncio.run(pair.link())


def test_decode_is_killed_midway_and_comes_back(pair: Pair) -> None:
    async def killed() -> None:
        async with pair.questions() as ask:
            asked = [await pair.midway(ask), ask()]
            pair.decode.kill()
            for one in asked:
                with pytest.raises(httpx.TransportError):
                    await one.decode
            await until(lambda: pair.prefill.at_baseline)
            for one in asked:
                one.drop()

    asyncio.run(killed())
    pair.repair()
    asyncio.run(pair.link())
