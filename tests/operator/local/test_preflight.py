"""What cannot work is told before anything starts, and is not tried again; the rest of the fleet runs."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from pagefleet_operator.errors import ManifestError
from pagefleet_operator.local import preflight
from pagefleet_operator.local.manifest import Manifest
from pagefleet_operator.local.preflight import find_mistakes
from pagefleet_operator.local.wanted import read_wanted
from pagefleet_protocol.resource_documents import parse_inference_service

SERVE = (sys.executable, "-m", "pagefleet_engine.cli")


@pytest.mark.fleet
def test_the_engine_itself_says_what_is_wrong(document: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PATIENCE_S", 300.0)
    documents = [
        document("right"),
        document("flag", engine={"args": ["--block-sise", "16"]}),
        document("folder", model={"uri": "file:///no/such/model"}),
        document("tokenizer", engine={"args": ["--tokenizer", "/no/such"]}),
        document("hub", model={"uri": "hf://organization/name"}),
        document("pairs", disaggregation={"prefill": {"replicas": 1}, "decode": {"replicas": 1}}),
        document("both", engine={"args": ["--block-size", "0"]}, disaggregation={"prefill": {}, "decode": {}}),
    ]
    wanted = read_wanted(Manifest(tuple(map(parse_inference_service, documents))), {})
    assert asyncio.run(find_mistakes(wanted, SERVE)) == {
        "flag": ("unknown argument '--block-sise'; did you mean --block-size? (see pagefleet serve --help)",),
        "folder": ("/no/such/model: no such folder; give a folder in Hugging Face layout, or builtin://tiny",),
        "tokenizer": ("tokenizer /no/such: no such folder; give one that holds tokenizer.json",),
        "both": ("--block-size is 0: give at least 1",),
    }


def test_a_program_that_cannot_be_run_or_says_nothing_is_no_mistake(document: Any) -> None:
    wanted = read_wanted(Manifest((parse_inference_service(document()),)), {})
    for serve in (("/no/such/program",), (sys.executable, "-c", "raise SystemExit(1)")):
        assert asyncio.run(find_mistakes(wanted, serve)) == {}


def test_a_fleet_of_mistakes_is_not_started(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(engine={"args": ["--block-sise", "x"]})) as fleet:
            with pytest.raises(ManifestError, match=r"fleet.yaml: qwen: .*unrecognized arguments: --block-sise x"):
                await fleet.finished
            assert list((fleet.state_dir / "logs").iterdir()) == []

    asyncio.run(scenario())


def test_a_mistake_is_tried_once_and_the_rest_of_the_fleet_runs(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document("a"), document("b", engine={"args": ["--mistaken"]})) as fleet:
            await fleet.until(lambda: fleet.settled(1, "a") and fleet.reporter.heard("b-engine-0: correct it"))
            await asyncio.sleep(1.0)  # longer than every pause between attempts
            assert sum("b-engine-0: starting" in text for text in fleet.reporter.said) == 1
            assert not fleet.reporter.heard("starts again")
            assert "a mistake (exit status 2)" in fleet.condition("Ready", "b").message
            assert (await fleet.ask("a"))[0] == 200
            fleet.edit(document("a"), document("b"))
            await fleet.until(lambda: fleet.settled(1, "b"))

    asyncio.run(scenario())


def test_an_edit_with_a_mistake_is_not_used(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            before = fleet.pids()
            fleet.edit(document(engine={"args": ["--block-sise", "x"]}))
            await fleet.until(lambda: fleet.reporter.heard("the edit is not used"))
            assert fleet.reporter.heard("unrecognized arguments: --block-sise x")
            assert fleet.pids() == before

    asyncio.run(scenario())


def test_what_is_broken_already_keeps_no_edit_of_others(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        broken = document("b", engine={"args": ["--block-sise", "x"]})
        async with start_fleet(document("a"), broken) as fleet:
            await fleet.until(lambda: fleet.settled(1, "a"))
            assert fleet.reporter.heard("unrecognized arguments: --block-sise x")
            fleet.edit(document("a", replicas=2), broken)
            await fleet.until(lambda: fleet.settled(2, "a"))

    asyncio.run(scenario())
