"""What a running fleet makes of fields that no process reads, of a pause, and of profiles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.resource_documents import profile_document

pytestmark = pytest.mark.fleet


def test_an_edit_that_no_process_reads_restarts_none(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            before = sorted(fleet.pids())
            fleet.edit(document(rollout={"maxSurge": 2}, resources={"shm": "2Gi"}, expose={"type": "ClusterIP"}))
            await fleet.until(lambda: fleet.view().status.observed_generation == 2)
            await asyncio.sleep(0.3)
            assert sorted(fleet.pids()) == before
            assert fleet.condition("Progressing").reason == "Settled"

    asyncio.run(scenario())


def test_nothing_is_changed_while_a_service_is_paused(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(paused=True)) as fleet:
            await fleet.until(lambda: fleet.view() is not None and fleet.view().status is not None)
            assert fleet.condition("Ready").reason == "Paused"
            assert fleet.states() == {}
            fleet.edit(document())
            await fleet.until(lambda: fleet.settled(1))
            before = sorted(fleet.pids())
            fleet.edit(document(paused=True, replicas=3, engine={"args": ["--marker", "two"]}))
            await fleet.until(lambda: fleet.view().status.mode == "Paused")
            await asyncio.sleep(0.3)
            assert sorted(fleet.pids()) == before
            assert fleet.condition("Ready").status == "True"
            fleet.edit(document(replicas=3, engine={"args": ["--marker", "two"]}))
            await fleet.until(lambda: fleet.view().status.mode == "Aggregated")
            await fleet.until(lambda: fleet.settled(3))
            assert (await fleet.ask())[1]["marker"] == "two"

    asyncio.run(scenario())


def test_a_profile_of_the_manifest_is_followed(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        def profile(marker: str) -> dict[str, Any]:
            env = [{"name": "FLEET_NOTE", "value": marker}]
            return profile_document(engine={"args": ["--marker", marker], "env": env})

        service = document(profileRef={"name": "h100"}, model={"uri": "builtin://tiny", "aliases": ["best"]})
        async with start_fleet(service, profile("one")) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            assert (await fleet.ask())[1]["model"] == "qwen,best"
            fleet.edit(service, profile("two"))
            await fleet.until(lambda: fleet.reporter.heard("qwen: was edited"))
            await fleet.until(lambda: fleet.reporter.heard("qwen: settled"))
            body = (await fleet.ask())[1]
            assert (body["marker"], body["note"]) == ("two", "two")
            fleet.edit(service)
            await fleet.until(lambda: fleet.reporter.heard("there is no InferenceProfile h100; there are none"))
            assert (await fleet.ask())[1]["marker"] == "two"

    asyncio.run(scenario())
