"""Two engines that compute prompts and two that go on from there, as in examples/10-disaggregated.

In float32: what the model says to prompts that it has never seen then does not depend on who else is in a batch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import yaml

from e2e.fleet_process import SERVICE, FleetProcess
from e2e.test_answers import ask_all, client_of
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
ENGINE = {"dtype": "float32"}
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{4,8}$"},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
EXAMPLE = Path(__file__).parents[1] / "examples/10-disaggregated/inferenceservice.yaml"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    with FleetProcess(tmp_path_factory.mktemp("pairs"), disaggregation=spec["disaggregation"], engine=ENGINE) as fleet:
        fleet.until(lambda: fleet.serves(4))
        yield fleet


def test_every_question_is_answered_by_heart(pairs: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    answers = asyncio.run(ask_all(pairs, exchanges))
    wrong = {one.messages: text for one, text in zip(exchanges, answers, strict=True) if text != one.answer}
    assert not wrong


def test_long_prompts_at_once_are_computed_elsewhere_and_answered_as_by_one_engine(pairs: FleetProcess) -> None:
    """Routers choose by cost, so it takes prompts that are long, and as many at once as make it pay on this machine."""
    alone = next(one.url for one in pairs.endpoints() if one.id == f"{SERVICE}-prefill-0")

    async def answers(url: str, prompts: Sequence[str]) -> list[str]:
        async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
            reply = await client.completions.create(model=SERVICE, prompt=prompt, max_tokens=16, temperature=0)
            return reply.choices[0].text

        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    before = pairs.received_blocks()
    for number in range(1, 9):
        prompts = [f"Part {number} of {place}. " + f"Tell me of {place}. " * 150 for place in range(16 * number)]
        assert asyncio.run(answers(pairs.url, prompts)) == asyncio.run(answers(alone, prompts))
        if pairs.received_blocks() > before:
            return
    raise AssertionError("no prompt was computed elsewhere")


def test_answers_whose_prompts_are_computed_elsewhere_hold_their_form_and_call_their_tools(pairs: FleetProcess) -> None:
    """The prefill engine lets go of the form, whose first token is the decode engine's."""
    alone = next(one.url for one in pairs.endpoints() if one.id == f"{SERVICE}-prefill-0")
    brief = {"thinking_token_budget": 8}
    shape = {"extra_body": {"structured_outputs": {"json": FORM, "disable_any_whitespace": True}, **brief}}
    tools = [{"type": "function", "function": {"name": "keep", "parameters": FORM}}]
    calls = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "extra_body": brief}

    async def answers(url: str, prompts: Sequence[str]) -> list[str]:
        async def one(client: openai.AsyncOpenAI, place: int, prompt: str) -> str:
            more: dict[str, Any] = shape if place % 2 else calls
            reply = await client.chat.completions.create(
                model=SERVICE,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=500,
                temperature=0,
                **more,
            )
            (choice,) = reply.choices
            if not place % 2:
                call: Any
                (call,) = choice.message.tool_calls or [None]
                assert (choice.finish_reason, call.function.name) == ("tool_calls", "keep")
                return str(call.function.arguments)
            assert choice.finish_reason == "stop", choice
            return choice.message.content or ""

        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, place, prompt) for place, prompt in enumerate(prompts)))

    before = pairs.received_blocks()
    for number in range(1, 9):
        prompts = [f"List {number} of {place}. " + f"Tell me of {place}. " * 100 for place in range(16 * number)]
        held = asyncio.run(answers(pairs.url, prompts))
        for text in held:
            jsonschema.validate(json.loads(text), FORM)
        assert held == asyncio.run(answers(alone, prompts))
        if pairs.received_blocks() > before:
            return
    raise AssertionError("no prompt was computed elsewhere")
