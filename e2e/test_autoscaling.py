"""A fleet that follows its load from one engine to none, to one, to three and back to none: every request is answered.

Long streams keep the engines busy, questions known by heart show that what is answered is right.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from e2e.fleet_process import PATIENCE_S, SERVICE, FleetProcess
from e2e.load import Load, Streamed, long_request, read_stream
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet

QUICK_UP = (str(Path(__file__).with_name("quick_up.py")),)
AUTOSCALING = {"max": 3, "target": {"queue": 2}, "scaleToZero": {"after": 10}}
# Few at once: what waits asks for engines, and what is computed meanwhile takes the cores on which those start.
ENGINE = {"args": ["--num-threads", "1", "--num-kv-blocks", "512", "--max-num-seqs", "2"]}


def num_engines(fleet: FleetProcess) -> int:
    return sum(name.startswith(f"{SERVICE}-engine") for name in fleet.pids())


def answered_at_zero(fleet: FleetProcess, exchanges: Sequence[Exchange]) -> tuple[list[str], Streamed]:
    """Ask questions and read one stream while there is no engine."""

    async def scenario() -> tuple[list[str], Streamed]:
        streamed = Streamed()
        async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE_S) as http:

            async def ask(exchange: Exchange) -> str:
                body = {"model": SERVICE, "messages": exchange.messages, "temperature": 0}
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                text: str = reply.json()["choices"][0]["message"]["content"]
                return text

            stream = read_stream(http, long_request(50), streamed)
            *answers, _ = await asyncio.gather(*map(ask, exchanges), stream)
        return [str(text) for text in answers], streamed

    return asyncio.run(scenario())


def test_follows_the_load_to_none_to_three_and_back_without_losing_a_request(
    tmp_path: Path, exchanges: Sequence[Exchange]
) -> None:
    async def scenario(fleet: FleetProcess) -> Load:
        # Long streams, so that some wait also while this process has no turn to ask for more.
        load = Load(fleet.url, exchanges, askers=5, streamers=8, stream_tokens=600)
        async with load:
            await asyncio.to_thread(fleet.until, lambda: num_engines(fleet) == 3)
            with load.lighter():
                await asyncio.to_thread(fleet.until, lambda: fleet.serves(3))
            await asyncio.to_thread(fleet.until, lambda: len({one.engine for one in load.streams if one.engine}) == 3)
            await load.progress(20)
        return load

    with FleetProcess(tmp_path, QUICK_UP, autoscaling=AUTOSCALING, engine=ENGINE) as fleet:
        fleet.until(lambda: "is ready at" in fleet.output)
        router = fleet.pids()[f"{SERVICE}-router-0"]
        fleet.until(lambda: num_engines(fleet) == 0)
        assert re.search(rf"{SERVICE}: scaled from 1 to 0: nobody asked for [0-9]+ s \(Idle\)", fleet.output)

        first = exchanges[:3]
        answers, streamed = answered_at_zero(fleet, first)
        assert answers == [one.answer for one in first]
        assert streamed.whole
        assert "for an engine (WokenUp)" in fleet.output

        load = asyncio.run(scenario(fleet))
        assert load.failures == []
        assert [one for one in load.streams if not one.whole] == []

        fleet.until(lambda: num_engines(fleet) == 0)
        assert fleet.pids() == {f"{SERVICE}-router-0": router}
        assert fleet.output.count("-router-0: starting") == 1
        assert "did not end by itself" not in fleet.output
