"""Two engines that compute prompts and two that go on from there, as in examples/10-disaggregated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
import pytest
import yaml

from e2e.fleet_process import FleetProcess
from e2e.test_answers import ask, ask_streamed, client_of
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
EXAMPLE = Path(__file__).parents[1] / "examples/10-disaggregated/inferenceservice.yaml"
RECEIVED = "pagefleet_engine_kv_transfer_received_blocks_total"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    with FleetProcess(tmp_path_factory.mktemp("pairs"), disaggregation=spec["disaggregation"]) as fleet:
        fleet.until(lambda: fleet.serves(4))
        yield fleet


def received(fleet: FleetProcess) -> float:
    """Blocks of K/V that decode engines got from prefill engines."""
    return sum(series.get(RECEIVED, 0.0) for series in fleet.engine_metrics().values())


async def ask_all(
    fleet: FleetProcess, exchanges: Sequence[Exchange], at_once: int, answered: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the answers; `answered` is called after each."""
    turns = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, number: int, exchange: Exchange) -> str:
        async with turns:
            text = await (ask_streamed if number % 2 else ask)(client, exchange)
            answered()
            return text

    async with client_of(fleet) as client:
        return await asyncio.gather(*(one(client, number, exchange) for number, exchange in enumerate(exchanges)))


def test_every_question_is_answered_by_heart(pairs: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    answers = asyncio.run(ask_all(pairs, exchanges, at_once=32))
    wrong = {one.messages: text for one, text in zip(exchanges, answers, strict=True) if text != one.answer}
    assert not wrong


def test_long_prompts_at_once_are_computed_elsewhere_and_answered_the_same(pairs: FleetProcess) -> None:
    """Routers choose by cost, so it takes prompts that are long, and many at once."""

    async def batch(number: int) -> list[tuple[str, str]]:
        prompts = [f"Part {number} of {place}. " + f"Tell me of {place}. " * 150 for place in range(16)]

        async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
            reply = await client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0)
            return reply.choices[0].text

        async with client_of(pairs) as client:
            first = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
            again = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        return list(zip(first, again, strict=True))

    before = received(pairs)
    for number in range(20):
        assert all(first == again for first, again in asyncio.run(batch(number)))
        if received(pairs) > before:
            return
    raise AssertionError("no prompt was computed elsewhere")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_killed_spoils_no_answer_and_comes_back(
    pairs: FleetProcess, exchanges: Sequence[Exchange], role: str
) -> None:
    async def scenario() -> list[str]:
        under_way = asyncio.Event()
        asking = asyncio.create_task(ask_all(pairs, exchanges[:60], 8, under_way.set))
        first = asyncio.create_task(under_way.wait())
        await asyncio.wait({asking, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        os.kill(pairs.core_pid(f"tiny-{role}-0"), signal.SIGKILL)
        return await asking

    pairs.until(lambda: pairs.serves(4))
    try:
        answers = asyncio.run(scenario())
    except openai.APIError:
        assert role == "decode", "a stream that has begun may end with its decode engine"
        answers = []
    assert [text for one, text in zip(exchanges, answers, strict=False) if text != one.answer] == []
    pairs.until(lambda: pairs.serves(4))
