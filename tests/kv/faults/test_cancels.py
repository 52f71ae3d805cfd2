"""Clients and routers that leave between prefill and decode: both engines have their blocks back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.fakes.kv_pair import Pair
from tests.fakes.kv_serving import until

pytestmark = pytest.mark.fleet

LEFT = 'pagefleet_engine_http_requests_total{route="/v1/chat/completions",status="499"}'


def test_leaving_midway_frees_both(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.questions() as ask:
            asked = await pair.midway(ask)
            asked.drop()
            await until(lambda: pair.prefill.at_baseline and pair.decode.at_baseline)  # before the late bytes come
            pair.data.arm("none")
            await pair.link()

    asyncio.run(scenario())


def test_leaving_once_prefill_has_ended_and_before_decode_was_asked_frees_it_with_the_lease(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.questions() as ask:
            expiries = pair.prefill.figure("lease_expiries_total")
            pair.decode.freeze()  # so that it hears of the request when its client has left
            try:
                asked = ask()
                await asked.prefill
                # A lease is short: who looks late finds that there was one.
                await until(
                    lambda: (
                        pair.prefill.figure("pinned_blocks") > 0
                        or pair.prefill.figure("lease_expiries_total") > expiries
                    )
                )
                asked.drop()
            finally:
                pair.decode.freeze(False)
            await until(lambda: pair.prefill.at_baseline and pair.decode.at_baseline)
            await pair.link()

    asyncio.run(scenario())


def test_prefill_legs_that_are_given_up_are_computed_by_decode(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.questions() as ask:
            await pair.link()
            pair.prefill.freeze()  # its server has them, and has not begun with any
            try:
                left = pair.prefill.metrics().get(LEFT, 0.0)
                asked = [ask() for _ in range(8)]

                def are_there() -> bool:
                    """Whether all wait for K/V, or did so until the engine that is frozen was taken for dead."""
                    waiting = pair.decode.metrics()["pagefleet_engine_requests_waiting"]
                    return waiting + sum(one.decode.done() for one in asked) == len(asked)

                await until(are_there)
                for one in asked:
                    one.prefill.cancel()
                # Its server may hear of that late, and an engine that goes on before it does computes them.
                await until(lambda: pair.prefill.metrics().get(LEFT, 0.0) == left + len(asked))
            finally:
                pair.prefill.freeze(False)
            assert [await one.num_passed() for one in asked] == [0] * len(asked)

    asyncio.run(scenario())


def test_several_answers_of_one_transfer_share_its_blocks_and_leave_together(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.questions() as ask:
            await pair.link()
            received = pair.decode.figure("received_blocks_total")
            asked = ask(n=3, temperature=0)
            num_passed = await asked.num_passed()
            assert len(await asked.answers()) == 3
            assert num_passed > 0
            await until(lambda: pair.decode.figure("received_blocks_total") > received)
            left = await pair.midway(ask, n=3)
            left.decode.cancel()
            await until(lambda: pair.decode.at_baseline)
            pair.data.arm("none")

    asyncio.run(scenario())


def test_only_a_router_of_the_fleet_directs_a_transfer(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.questions() as ask, httpx.AsyncClient(timeout=60) as http:
            asked = ask()
            await asked.num_passed()
            body = {"model": "tiny", "messages": [{"role": "user", "content": "What is a pod?"}]}
            url = f"{pair.decode.url}/v1/chat/completions"
            replayed = asked.prefill.result().request.headers["x-pagefleet-kv-transfer"]  # meant for the other engine
            for value in (replayed, replayed[:-1], "leg=decode", ""):
                reply = await http.post(url, json=body, headers={"x-pagefleet-kv-transfer": value})
                assert reply.status_code in (400, 403), reply.text
            reply = await http.post(url, json={**body, "kv_transfer_params": {"remote_host": "127.0.0.1"}})
            assert reply.status_code == 400

    asyncio.run(scenario())
