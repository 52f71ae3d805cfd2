"""A new revision that `pagefleet up` tries out under load: one that is as good, then one that refuses requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet_process import ENGINE_ARGS, FleetProcess
from e2e.load import Load
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
CANARY = {
    "steps": [{"percent": 20, "seconds": 5}, {"percent": 50, "seconds": 5}],
    # Of a busy machine latencies say little: another engine has the cores.
    "analysis": {"minRequests": 5, "maxTtft": 10_000, "maxItl": 10_000, "patience": 100},
}
WHOLE: dict[str, Any] = {"replicas": 2}
PAIR: dict[str, Any] = {"disaggregation": {"threshold": 0}}


def engines(fleet: FleetProcess) -> list[int]:
    return [pid for name, pid in fleet.pids().items() if "router" not in name]


@pytest.mark.parametrize("spec", [WHOLE, PAIR], ids=["whole", "pair"])
def test_goes_on_by_itself_and_back_by_itself(
    tmp_path: Path, exchanges: Sequence[Exchange], spec: Mapping[str, Any]
) -> None:
    async def scenario(fleet: FleetProcess) -> tuple[Load, Load]:
        async def until(words: str) -> None:
            await asyncio.to_thread(fleet.until, lambda: words in fleet.output)

        async with Load(fleet.url, exchanges, askers=3, streamers=2, stream_tokens=40, pause_s=0.3) as good:
            await good.progress()
            fleet.edit(engine={"args": [*ENGINE_ARGS, "--max-num-seqs", "8"]})
            await until("step 1 of 2: the new revision gets 20 % of the requests")
            await until("step 2 of 2: the new revision gets 50 % of the requests")
            await until("the new revision is no worse, and replaces the old one")
            await asyncio.to_thread(fleet.until, lambda: not first & set(engines(fleet)) and fleet.serves(2))
        async with Load(fleet.url, exchanges, askers=3, streamers=2, stream_tokens=40, pause_s=0.3) as bad:
            await bad.progress()
            fleet.edit(engine={"args": [*ENGINE_ARGS, "--max-num-seqs", "8"], "maxModelLen": 16})
            await until("the new revision went back at step 1: ")
            await asyncio.to_thread(fleet.until, lambda: fleet.serves(2))
            bad.failures.clear()
            await bad.progress(30)
            assert bad.failures == []
        return good, bad

    with FleetProcess(tmp_path, **spec, rollout={"canary": CANARY}) as fleet:
        fleet.until(lambda: fleet.serves(2))
        first = set(engines(fleet))
        good, bad = asyncio.run(scenario(fleet))
        assert good.failures == []
        assert all(one.whole for one in good.streams)
        why = next(line for line in fleet.output.splitlines() if "the new revision went back at step 1: " in line)
        assert "the old revision's" in why, (
            why
        )  # that it refuses; on a machine that is slow just then, how long it takes
        refused = Counter(one.status for one in bad.streams)
        assert set(refused) <= {200, 400}
        assert refused[200] > refused[400], "only its share went to what refuses"
