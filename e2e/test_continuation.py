"""kill -9 in the middle of streams: another engine goes on, to the letter where the next token is certain.

In float32, as a batch's size then changes no token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_process import SERVICE, FleetProcess
from e2e.midway import kill_midway, until_begun

pytestmark = pytest.mark.fleet

SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
    "by chance": {"temperature": 1},
}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUED = 'pagefleet_router_streams_continued_total{model="tiny"}'
MOST_STREAMS = 24
RATE, SECONDS = 5, 6
LONG = 400
"""Tokens of a stream that lasts until its engine is killed."""
ENGINE = {"args": ["--num-threads", "1", "--num-kv-blocks", "2048"], "dtype": "float32"}


@dataclass(slots=True)
class Reading:
    """One stream, as far as it was read."""

    kind: str
    engine: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    ids: set[str] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    """Finish reasons, errors' codes, and [DONE], in their order."""
    num_tokens: int | None = None
    """As the usage says."""

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def take(self, data: str) -> None:
        """Note one event."""
        if data == "[DONE]":
            self.ends.append(data)
            return
        event = json.loads(data)
        if "error" in event:
            self.ends.append(event["error"]["type"])
            return
        self.ids.add(event["id"])
        if not event["choices"]:
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                self.ends.append(choice["finish_reason"])


async def read(
    http: httpx.AsyncClient, reading: Reading, max_tokens: int = LONG, n: int = 1, chat: bool = False
) -> None:
    body = {"model": SERVICE, "max_tokens": max_tokens, "n": n, "ignore_eos": True, "stream": True} | USAGE
    route, prompt = ("/v1/chat/completions" if chat else "/v1/completions"), "A page fleet is"
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    async with http.stream("POST", route, json=body | ask | SAMPLING[reading.kind]) as reply:
        assert reply.status_code == 200
        reading.engine = reply.headers["x-pagefleet-engine"]
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                reading.take(line.removeprefix("data: "))


async def alone(http: httpx.AsyncClient, kind: str) -> str:
    """Return what nobody disturbs."""
    reading = Reading(kind)
    await read(http, reading)
    assert reading.ends == ["length", "[DONE]"]
    return reading.text


def test_streams_outlive_their_engine(tmp_path: Path) -> None:
    readings: list[Reading] = []

    async def scenario(fleet: FleetProcess) -> dict[str, str]:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as http:
            whole = {kind: await alone(http, kind) for kind in ("greedy", "seeded")}
            tasks = []
            while not await kill_midway(fleet, readings, SAMPLING):
                assert len(readings) < MOST_STREAMS
                for kind in SAMPLING:
                    readings.append(Reading(kind))
                    tasks.append(asyncio.create_task(read(http, readings[-1])))
                    await until_begun(readings[-1])
            await asyncio.gather(*tasks)
        return whole

    with FleetProcess(tmp_path, replicas=2, engine=ENGINE) as fleet:
        fleet.until(lambda: fleet.serves(2))
        whole = asyncio.run(scenario(fleet))
        continued = fleet.metrics(fleet.url)[CONTINUED]
    assert [one.ends for one in readings] == [["length", "[DONE]"]] * len(readings)
    certain = [one for one in readings if one.kind != "by chance"]
    assert [one.text for one in certain] == [whole[one.kind] for one in certain]
    assert all(len(one.ids) == 1 for one in readings)
    assert continued >= len(SAMPLING)


def test_under_steady_traffic_no_stream_is_cut(tmp_path: Path) -> None:
    """Five streams a second at OpenAI's default temperature, of one choice and of two, in a fleet of two."""
    readings: list[Reading] = []
    lengths: list[int] = []

    async def scenario(fleet: FleetProcess) -> None:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as http:
            tasks = []

            def start(max_tokens: int) -> None:
                number = len(readings)
                readings.append(Reading("by chance"))
                lengths.append(max_tokens)
                body = max_tokens, 1 + number % 2, number % 4 > 1
                tasks.append(asyncio.create_task(read(http, readings[number], *body)))

            for second in range(SECONDS):
                for _ in range(RATE):
                    start(60)
                    await asyncio.sleep(1 / RATE)
                while second == SECONDS // 2 and not await kill_midway(fleet, readings[-1:], {"by chance"}):
                    assert len(readings) < 2 * RATE * SECONDS
                    start(LONG)
                    await until_begun(readings[-1])
            await asyncio.gather(*tasks)

    with FleetProcess(tmp_path, replicas=2, engine=ENGINE) as fleet:
        fleet.until(lambda: fleet.serves(2))
        asyncio.run(scenario(fleet))
        metrics = fleet.metrics(fleet.url)
    for number, one in enumerate(readings):
        n = 1 + number % 2
        assert one.ends == ["length"] * n + ["[DONE]"], number
        assert (len(one.texts), len(one.ids), one.num_tokens) == (n, 1, lengths[number] * n)
    assert metrics[CONTINUED] >= 1
    assert metrics["pagefleet_router_streams_cut_total"] == 0
