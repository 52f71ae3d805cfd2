"""A network that swallows all between two engines in the middle of transfers: both notice, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from pagefleet_protocol.kv_handoff import OnFailure

from tests.fakes.kv_namespaces import (
    ADDRESS,
    LONG_PROMPT_TOKENS,
    Partitioned,
    long_prompt,
    partitioned_pair,
)
from tests.fakes.kv_serving import Asked, Questions, until
from tests.fakes.network_namespace import NoNamespaces

pytestmark = pytest.mark.fleet


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Partitioned]:
    try:
        with partitioned_pair(tmp_path_factory.mktemp("partition")) as pair:
            yield pair
    except NoNamespaces as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_a_partition_in_the_middle_of_transfers(pair: Partitioned) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            questions = Questions(http, pair.key)

            def complete(number: int, on_failure: OnFailure) -> Asked:
                return questions.complete(pair.prefill, pair.decode, ADDRESS, long_prompt(number), on_failure)

            async def alone(number: int) -> str:
                body = {"model": "tiny", "prompt": long_prompt(number), "max_tokens": 8, "ignore_eos": True}
                reply = await http.post(f"{pair.decode.url}/v1/completions", json={**body, "temperature": 0})
                return text_of(reply)

            async def is_passed(number: int) -> bool:
                reply = await complete(number, "recompute").decode
                assert text_of(reply) == expected[number]
                cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached > LONG_PROMPT_TOKENS // 2

            expected = {number: await alone(number) for number in (1, 2, 3)}
            codes: set[str] = set()
            while not codes:  # who sees the first block late may find that all have come
                pair.cut(False)
                while not await is_passed(3):
                    pass
                received = pair.decode.figure("received_blocks_total")
                # Several, so that some are still on their way when the first block is seen to have come.
                computed, *failed = complete(1, "recompute"), *(complete(number, "fail") for number in (2, 4, 5, 6, 7))
                await until(lambda before=received: pair.decode.figure("received_blocks_total") > before)  # type: ignore[misc]
                pair.cut()
                answers = [(await one.decode).json() for one in failed]
                codes = {one["error"]["code"] for one in answers if "error" in one}
                assert text_of(await computed.decode) == expected[1]
            assert codes == {"kv_load_failed"}
            await until(lambda: pair.prefill.at_baseline and pair.decode.at_baseline)
            pair.cut(False)
            while not await is_passed(3):  # it is dialled again after a pause
                pass
            await questions.ended()
            await until(lambda: pair.prefill.at_baseline and pair.decode.at_baseline)

    asyncio.run(scenario())
