"""Everything that the embedded model knows, asked through the router with OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from e2e.fleet_process import PATIENCE_S, SERVICE, FleetProcess
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet


async def ask(client: openai.AsyncOpenAI, exchange: Exchange) -> str:
    messages: Any = exchange.messages
    reply = await client.chat.completions.create(model=SERVICE, messages=messages, temperature=0)
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content or ""


async def ask_streamed(client: openai.AsyncOpenAI, exchange: Exchange) -> str:
    messages: Any = exchange.messages
    text, reasons = "", []
    stream = await client.chat.completions.create(model=SERVICE, messages=messages, temperature=0, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])
    return text


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S)


async def ask_all(fleet: FleetProcess, exchanges: Sequence[Exchange]) -> list[str]:
    """Return the answers, of which every second one is streamed."""
    at_once = asyncio.Semaphore(32)

    async def one(client: openai.AsyncOpenAI, number: int, exchange: Exchange) -> str:
        async with at_once:
            return await (ask_streamed if number % 2 else ask)(client, exchange)

    async with client_of(fleet.url) as client:
        return await asyncio.gather(*(one(client, number, exchange) for number, exchange in enumerate(exchanges)))


def test_every_question_and_conversation_is_answered_by_heart(
    fleet: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    assert len(exchanges) >= 190
    answers = asyncio.run(ask_all(fleet, exchanges))
    wrong = {one.messages: text for one, text in zip(exchanges, answers, strict=True) if text != one.answer}
    assert not wrong


def test_64_at_once_get_what_each_gets_alone(fleet: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    # The last ones are the conversations, with histories of different lengths.
    chosen = exchanges[-64:]

    async def scenario() -> tuple[list[str], list[str]]:
        async with client_of(fleet.url) as client:
            alone = [await ask(client, one) for one in chosen]
            return alone, await asyncio.gather(*(ask(client, one) for one in chosen))

    alone, together = asyncio.run(scenario())
    assert together == alone
    assert len(set(alone)) > 32
