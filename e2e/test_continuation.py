"""kill -9 in the middle of streams: another engine goes on to the letter where it can; else the client is told.

In float32, as a batch's size then changes no token.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_process import SERVICE, FleetProcess
from tests.fakes.fleet_processes import all_gone

pytestmark = pytest.mark.fleet

SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
    "by chance": {"temperature": 1},
}
CONTINUED = 'pagefleet_router_streams_continued_total{model="tiny"}'
MOST_STREAMS = 24
ENGINE = {"args": ["--num-threads", "1", "--num-kv-blocks", "2048"], "dtype": "float32"}


@dataclass(slots=True)
class Reading:
    """One stream, as far as it was read."""

    kind: str
    engine: str = ""
    text: str = ""
    ids: set[str] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    """Finish reasons, errors' codes, and [DONE], in their order."""

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
        (choice,) = event["choices"]
        self.text += choice["text"]
        if choice["finish_reason"]:
            self.ends.append(choice["finish_reason"])


async def read(http: httpx.AsyncClient, reading: Reading, max_tokens: int = 400) -> None:
    body = {"model": SERVICE, "prompt": "A page fleet is", "max_tokens": max_tokens, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True} | SAMPLING[reading.kind]) as reply:
        assert reply.status_code == 200
        reading.engine = reply.headers["x-pagefleet-engine"]
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                reading.take(line.removeprefix("data: "))


async def until_begun(reading: Reading) -> None:
    async with asyncio.timeout(60):
        while len(reading.text) < 40:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


def hit_by_all(readings: Sequence[Reading]) -> str | None:
    """Return an engine that is in the middle of a stream of each kind."""
    kinds: dict[str, set[str]] = {}
    for one in readings:
        if not one.ends:
            kinds.setdefault(one.engine, set()).add(one.kind)
    return next((engine for engine, found in kinds.items() if found == set(SAMPLING)), None)


async def alone(http: httpx.AsyncClient, kind: str) -> str:
    """Return what nobody disturbs."""
    reading = Reading(kind)
    await read(http, reading)
    assert reading.ends == ["length", "[DONE]"]
    return reading.text


def test_streams_outlive_their_engine_where_the_next_token_is_certain(tmp_path: Path) -> None:
    readings: list[Reading] = []

    async def scenario(fleet: FleetProcess) -> tuple[str, dict[str, str]]:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=120) as http:
            whole = {kind: await alone(http, kind) for kind in ("greedy", "seeded")}
            tasks = []
            while (victim := hit_by_all(readings)) is None:
                assert len(readings) < MOST_STREAMS
                for kind in SAMPLING:
                    readings.append(Reading(kind))
                    tasks.append(asyncio.create_task(read(http, readings[-1])))
                    await until_begun(readings[-1])
            server, core = fleet.pids()[victim], fleet.core_pid(victim)
            os.kill(server, signal.SIGKILL)
            assert await asyncio.to_thread(all_gone, [server, core])
            await asyncio.gather(*tasks)
        return victim, whole

    with FleetProcess(tmp_path, replicas=2, engine=ENGINE) as fleet:
        fleet.until(lambda: fleet.serves(2))
        victim, whole = asyncio.run(scenario(fleet))
        continued = fleet.metrics(fleet.url)[CONTINUED]
    # Those of the other engine, and those that ended before the kill, are as good.
    certain = [one for one in readings if one.kind != "by chance"]
    assert [one.ends for one in certain] == [["length", "[DONE]"]] * len(certain)
    assert [one.text for one in certain] == [whole[one.kind] for one in certain]
    assert all(len(one.ids) == 1 for one in readings)
    assert continued >= 2
    ends = [one.ends for one in readings if one.kind == "by chance" and one.engine == victim]
    assert ["server_error"] in ends
    assert all(end in (["server_error"], ["length", "[DONE]"]) for end in ends)
