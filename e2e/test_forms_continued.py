"""kill -9 in the middle of forms and tool calls, in each API's stream: another engine goes on within the form.

Every item of a form has its length, so that a character lost or doubled breaks the form. In float32, as a batch's
size then changes no token: the answers are, to the letter, those that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import jsonschema
import pytest

from e2e.fleet_process import SERVICE, FleetProcess
from e2e.midway import kill_midway, until_begun

pytestmark = pytest.mark.fleet

ENGINE = {"args": ["--num-threads", "1", "--num-kv-blocks", "2048"], "dtype": "float32"}
CONTINUED = 'pagefleet_router_streams_continued_total{model="tiny"}'
MOST_ROUNDS = 8
NUM_ITEMS = 50
FORM: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {"type": "string", "pattern": "^[a-z]{8}$"},
                "minItems": NUM_ITEMS,
                "maxItems": NUM_ITEMS,
            },
            "note": {"type": "string", "minLength": 40, "maxLength": 40},
        },
        "required": ["items", "note"],
        "additionalProperties": False,
    }
)
TEXT = "Fill in the list."
TURNS = [{"role": "user", "content": TEXT}]
TOOL = {"name": "keep", "description": "Keeps a list", "parameters": dict(FORM)}


@dataclass(slots=True)
class Reading:
    """One stream, as far as it was read."""

    kind: str
    engine: str = ""
    text: str = ""
    """Of the form: content, or a call's arguments."""
    names: list[str] = field(default_factory=list)
    """Of the calls that have begun."""
    ids: set[str] = field(default_factory=set)
    """Of the answer, and of what it consists of, with its place."""
    numbers: list[int] = field(default_factory=list)
    """Of the events, in an API that numbers them."""
    ends: list[str] = field(default_factory=list)
    whole: str | None = None
    """The form as the last events repeat it, in an API that does."""


def take_chat(reading: Reading, event: Mapping[str, Any]) -> None:
    reading.ids.add(event["id"])
    for choice in event["choices"]:
        delta = choice["delta"]
        reading.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            reading.ids.update(f"call {call['index']} {call['id']}" for _ in range("id" in call))
            reading.names += [call["function"]["name"]] if "name" in call["function"] else []
            reading.text += call["function"].get("arguments") or ""
        reading.ends += [choice["finish_reason"]] if choice["finish_reason"] else []


def take_response(reading: Reading, event: Mapping[str, Any]) -> None:
    reading.numbers.append(event["sequence_number"])
    kind = event["type"]
    if "response" in event:
        reading.ids.add(event["response"]["id"])
    if "item_id" in event:
        reading.ids.add(f"item {event['output_index']} {event['item_id']}")
    if kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
        reading.text += event["delta"]
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        reading.names.append(event["item"]["name"])
    elif kind in ("response.completed", "response.incomplete", "response.failed", "error"):
        reading.ends.append(kind)
        (item,) = event["response"]["output"]
        reading.whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def take_message(reading: Reading, event: Mapping[str, Any]) -> None:
    kind = event["type"]
    if kind == "message_start":
        reading.ids.add(event["message"]["id"])
    elif kind == "content_block_start":
        reading.ids.add(f"block {event['index']} {event['content_block'].get('id')}")
        reading.names += [event["content_block"]["name"]] if "name" in event["content_block"] else []
    elif kind == "content_block_delta":
        assert event["index"] == 0
        reading.text += event["delta"].get("partial_json") or event["delta"].get("text") or ""
    elif kind == "message_delta":
        reading.ends.append(event["delta"]["stop_reason"])
    elif kind in ("message_stop", "error"):
        reading.ends.append(kind)


@dataclass(frozen=True, slots=True)
class Ask:
    """One kind of stream, and how it ends when nothing is wrong."""

    path: str
    body: Mapping[str, Any]
    take: Callable[[Reading, Mapping[str, Any]], None]
    ends: tuple[str, ...]
    num_ids: int
    names: tuple[str, ...] = ()


ASKS: Mapping[str, Ask] = {
    "chat form": Ask(
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": dict(FORM), "strict": True},
            },
        },
        take_chat,
        ("stop", "[DONE]"),
        1,
    ),
    "chat call": Ask(
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        take_chat,
        ("tool_calls", "[DONE]"),
        2,
        ("keep",),
    ),
    "response form": Ask(
        "/v1/responses",
        {"input": TEXT, "text": {"format": {"type": "json_schema", "name": "x", "schema": dict(FORM), "strict": True}}},
        take_response,
        ("response.completed",),
        2,
    ),
    "response call": Ask(
        "/v1/responses",
        {
            "input": TEXT,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        take_response,
        ("response.completed",),
        2,
        ("keep",),
    ),
    "message call": Ask(
        "/v1/messages",
        {
            "messages": TURNS,
            "tools": [{"name": "keep", "input_schema": dict(FORM)}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
        take_message,
        ("tool_use", "message_stop"),
        2,
        ("keep",),
    ),
}


async def read(http: httpx.AsyncClient, reading: Reading, previous: str | None = None) -> None:
    ask = ASKS[reading.kind]
    limit = "max_output_tokens" if ask.path == "/v1/responses" else "max_tokens"
    body = {"model": SERVICE, "temperature": 0, "stream": True, limit: 1500, **ask.body}
    body |= {"previous_response_id": previous} if previous else {}
    async with http.stream("POST", ask.path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        reading.engine = reply.headers["x-pagefleet-engine"]
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                reading.ends.append("[DONE]")
            elif line.startswith("data: "):
                ask.take(reading, json.loads(line.removeprefix("data: ")))


def test_forms_and_calls_outlive_their_engine(tmp_path: Path) -> None:
    readings: list[Reading] = []
    alone = {kind: Reading(kind) for kind in ASKS}

    async def scenario(fleet: FleetProcess) -> None:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as http:
            for one in alone.values():
                await read(http, one)
            tasks = []
            while not await kill_midway(fleet, readings, ASKS):
                assert len(readings) < MOST_ROUNDS * len(ASKS)
                started = [Reading(kind) for kind in ASKS]
                readings.extend(started)
                tasks += [asyncio.create_task(read(http, one)) for one in started]
                await asyncio.gather(*map(until_begun, started))
            await asyncio.gather(*tasks)

    # Each in turn: by prefix a kind could keep to one engine, and another kind to the other.
    with FleetProcess(tmp_path, replicas=2, engine=ENGINE, router={"policy": "round-robin"}) as fleet:
        fleet.until(lambda: fleet.serves(2))
        asyncio.run(scenario(fleet))
        metrics = fleet.metrics(fleet.url)
    for one in [*alone.values(), *readings]:
        ask = ASKS[one.kind]
        assert tuple(one.ends) == ask.ends, one.kind
        assert tuple(one.names) == ask.names, one.kind
        assert len(one.ids) == ask.num_ids, (one.kind, one.ids)
        assert one.numbers == list(range(len(one.numbers))), one.kind
        jsonschema.validate(json.loads(one.text), dict(FORM))
        assert one.whole in (None, one.text), one.kind
        assert one.text == alone[one.kind].text, one.kind
    assert metrics[CONTINUED] >= len(ASKS)
    assert metrics["pagefleet_router_streams_cut_total"] == 0


def test_a_response_that_goes_on_from_another_outlives_the_engine_that_has_that(tmp_path: Path) -> None:
    kind = "response form"
    alone, lost = Reading(kind), Reading(kind)

    async def scenario(fleet: FleetProcess) -> None:
        nonlocal lost
        async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as http:
            reply = await http.post("/v1/responses", json={"model": SERVICE, "input": "What is a KV cache?"})
            before = reply.json()["id"]
            await read(http, alone, before)
            for _ in range(MOST_ROUNDS):
                lost = Reading(kind)
                reading = asyncio.create_task(read(http, lost, before))
                await until_begun(lost)
                if await kill_midway(fleet, [lost], {kind}):
                    break
            await reading
        assert lost.engine == alone.engine == reply.headers["x-pagefleet-engine"]

    with FleetProcess(tmp_path, replicas=2, engine=ENGINE) as fleet:
        fleet.until(lambda: fleet.serves(2))
        asyncio.run(scenario(fleet))
        metrics = fleet.metrics(fleet.url)
    for one in (alone, lost):
        assert tuple(one.ends) == ASKS[kind].ends
        assert len(one.ids) == ASKS[kind].num_ids
        assert one.numbers == list(range(len(one.numbers)))
        jsonschema.validate(json.loads(one.text), dict(FORM))
    assert lost.text == lost.whole == alone.text
    assert metrics[CONTINUED] == 1
