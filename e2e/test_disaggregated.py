"""Two engines that compute prompts and two that go on from there, as in examples/10-disaggregated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
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


async def ask_all(fleet: FleetProcess, exchanges: Sequence[Exchange], at_once: int) -> list[str]:
    turns = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, number: int, exchange: Exchange) -> str:
        async with turns:
            return await (ask_streamed if number % 2 else ask)(client, exchange)

    async with client_of(fleet) as client:
        return await asyncio.gather(*(one(client, number, exchange) for number, exchange in enumerate(exchanges)))


def test_every_question_is_answered_by_heart_over_passed_kv(pairs: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    before = received(pairs)
    answers = asyncio.run(ask_all(pairs, exchanges, at_once=32))
    wrong = {one.messages: text for one, text in zip(exchanges, answers, strict=True) if text != one.answer}
    assert not wrong
    assert received(pairs) > before, "some prompts at least were computed elsewhere"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_killed_spoils_no_answer_and_comes_back(
    pairs: FleetProcess, exchanges: Sequence[Exchange], role: str
) -> None:
    async def scenario() -> list[str]:
        asking = asyncio.create_task(ask_all(pairs, exchanges[:60], at_once=8))
        await asyncio.sleep(0)
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
