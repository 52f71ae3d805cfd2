"""Engines of two tensor ranks under `pagefleet up`: right answers, also when a rank dies, whose number is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from e2e.fleet_process import FleetProcess
from e2e.load import Load
from tests.fakes.fleet_processes import all_gone, child_pids
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """Two engines of two ranks each."""
    with FleetProcess(tmp_path_factory.mktemp("ranks"), replicas=2, parallelism={"tensor": 2}) as fleet:
        fleet.until(lambda: fleet.serves(2))
        yield fleet


def test_a_rank_that_is_killed_costs_no_answer_and_is_named(
    spread: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    async def scenario() -> Load:
        load = Load(spread.url, exchanges, askers=8, streamers=4, stream_tokens=200)
        async with load:
            await load.progress()
            victim = load.busiest()
            server, core = spread.pids()[victim], spread.core_pid(victim)
            ranks = child_pids(core)
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)
            assert await asyncio.to_thread(all_gone, [server, core, *ranks])
            await load.progress()
            with load.lighter():
                await asyncio.to_thread(
                    spread.until, lambda: spread.pids().get(victim, server) != server and spread.serves(2)
                )
            await load.progress()
            told = f"{victim}: failed, rank 1 on "
            assert told in spread.output, spread.output
        return load

    load = asyncio.run(scenario())
    assert load.failures == []
    assert [one for one in load.streams if not one.whole] == []
