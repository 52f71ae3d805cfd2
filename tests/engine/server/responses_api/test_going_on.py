"""A stream whose prompt is made of stored responses goes on at an engine that has none of them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoreLimits
from pagefleet_protocol.handoff import PROMPT_START, Shown, StreamState, take_note, take_prompt

from tests.fakes.inline_engine import script_core
from tests.fakes.stream_site import TEXT, TOKENIZER, Site, blocks_of, open_site, script_of

STATE = StreamState("0123456789abcdef" * 2, 1_700_000_001)
ROUTE = "/v1/responses"


@asynccontextmanager
async def engine() -> AsyncIterator[Site]:
    """One with a store of its own."""
    store = ResponseStore(sqlite3.connect(":memory:", check_same_thread=False), None, StoreLimits(2**20, 60.0))
    shelf = ResponseShelf(store, Drain(8), OpenRequests())
    async with open_site(script_core(script_of(TEXT), 400), TOKENIZER, shelf=shelf) as site:
        yield site
    await shelf.close()


def asked(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "temperature": 0, "max_output_tokens": 12, **fields}).encode()


def without_usage(events: list[bytes]) -> list[Any]:
    """Cached tokens, and the time of the end, are another engine's own."""
    shaped = [json.loads(event.partition(b"data: ")[2]) for event in events]
    for event in shaped:
        response = event.get("response", {})
        response.pop("completed_at", None)
        if response.get("usage"):
            response["usage"].pop("input_tokens_details")
    return shaped


@pytest.mark.parametrize("refers", ["previous", "reference alone"])
def test_it_goes_on_after_every_event(refers: str) -> None:
    async def main() -> None:
        async with engine() as first, engine() as second:
            made = (await first.send(ROUTE, asked(input="Hello"))).json()
            fields: dict[str, Any] = {"input": "And now?", "previous_response_id": made["id"]}
            if refers != "previous":
                fields = {"input": [{"type": "item_reference", "id": f"msg_{made['id'][5:]}8000"}]}
            body = asked(stream=True, **fields)
            assert (await second.send(ROUTE, body)).status_code == 400, "it has not what this refers to"
            blocks = blocks_of((await first.send(ROUTE, body, STATE)).content)
            comments = [block for block in blocks if block.startswith(PROMPT_START)]
            assert comments == blocks[: len(comments)] != [], "before all events"
            prompt = b"".join(map(take_prompt, comments))
            events = blocks[len(comments) :]
            whole = without_usage([take_note(event)[0] for event in events])
            assert whole[-1]["response"]["usage"]["input_tokens"] == len(prompt) // 4
            position = 0
            tokens, state = b"", STATE
            while True:
                _, note = take_note(events[position])
                assert note is not None
                position += note.num_events
                if position == len(events):
                    break
                tokens += note.tokens
                shown = Shown(len(tokens) // 4, note.num_chars)
                state = replace(STATE, choices=(shown,), num_events=position)
                rest = await second.send(ROUTE, body, state, prompt + tokens, len(prompt) // 4)
                assert rest.status_code == 200, rest.text
                more = blocks_of(rest.content)
                assert not any(block.startswith(PROMPT_START) for block in more), "the router has it"
                assert whole[:position] + without_usage([take_note(event)[0] for event in more]) == whole

    asyncio.run(main())


def test_a_router_is_told_no_prompt_that_it_can_make_itself() -> None:
    async def main() -> None:
        async with engine() as site:
            answer = await site.send(ROUTE, asked(stream=True, input="Hello"), STATE)
            assert PROMPT_START not in answer.content
            made = (await site.send(ROUTE, asked(input="Hello"))).json()
            body = asked(stream=True, input="And now?", previous_response_id=made["id"])
            assert PROMPT_START not in (await site.send(ROUTE, body)).content, "nobody asks for notes"

    asyncio.run(main())
