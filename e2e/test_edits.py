"""Edits of the file while clients ask: new settings engine by engine, more and fewer replicas, not one request lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import httpx
import pytest

from e2e.fleet_process import FleetProcess
from e2e.load import Load
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet


def assert_nothing_failed(load: Load) -> None:
    assert load.failures == []
    assert [one for one in load.streams if not one.whole] == []
    assert load.num_right > 20


def test_new_settings_reach_every_engine_without_a_failed_request(
    fleet: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    before = {fleet.pids()[one.id] for one in fleet.endpoints()}

    def replaced() -> bool:
        return fleet.serves(2) and not before & set(fleet.pids().values())

    async def scenario() -> Load:
        load = Load(fleet.url, exchanges)
        async with load:
            await load.progress()
            fleet.edit(engine={"maxModelLen": 1024})
            with load.lighter():
                await asyncio.to_thread(fleet.until, replaced)
            await load.progress()
        return load

    assert_nothing_failed(asyncio.run(scenario()))
    limits = [
        httpx.get(f"{one.url}/v1/models", timeout=60).json()["data"][0]["max_model_len"] for one in fleet.endpoints()
    ]
    assert limits == [1024, 1024]


def test_engines_come_and_go_without_a_failed_request(fleet: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    async def scenario() -> Load:
        load = Load(fleet.url, exchanges)
        async with load:
            for replicas in (1, 2, 1):
                await load.progress()
                fleet.edit(replicas=replicas)
                with load.lighter():
                    await asyncio.to_thread(fleet.until, partial(fleet.serves, replicas))
            await load.progress()
        return load

    assert_nothing_failed(asyncio.run(scenario()))
