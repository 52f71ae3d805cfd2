"""kill -9 under load: every answer is whole, and the replica returns."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from e2e.fleet_process import FleetProcess
from e2e.load import Load
from tests.fakes.fleet_processes import all_gone
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet


def num_retries(fleet: FleetProcess) -> float:
    metrics = fleet.metrics(fleet.url)
    return sum(value for name, value in metrics.items() if name.startswith("pagefleet_router_retries_total"))


@pytest.mark.parametrize("part", ["engine core", "server"])
def test_no_request_vanishes_when_an_engine_is_killed(
    fleet: FleetProcess, exchanges: Sequence[Exchange], part: str
) -> None:
    retries_before = num_retries(fleet)

    async def scenario() -> Load:
        load = Load(fleet.url, exchanges, askers=24, streamers=8, stream_tokens=400)
        async with load:
            await load.progress()
            victim = load.busiest()
            server, core = fleet.pids()[victim], fleet.core_pid(victim)
            os.kill(core if part == "engine core" else server, signal.SIGKILL)
            assert await asyncio.to_thread(all_gone, [server, core])
            await load.progress()
            with load.lighter():
                await asyncio.to_thread(
                    fleet.until, lambda: fleet.pids().get(victim, server) != server and fleet.serves(2)
                )
            await load.progress()
        return load

    load = asyncio.run(scenario())
    assert load.failures == []
    assert [one for one in load.streams if not one.whole] == []
    assert all(one.nothing_after_end for one in load.streams)
    assert num_retries(fleet) > retries_before
