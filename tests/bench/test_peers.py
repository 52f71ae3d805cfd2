"""Ratios against peers: what is compared with what, and that one who fails leaves the others' rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from bench.engines.client import EngineFailedError, EngineProcess, EngineSpec
from bench.gpu_parts import second_parts
from bench.peers import PEERS, Figures, Traffic, compare, measure, specs, tokens_per_s, traffics


class Engine:
    """Takes a tenth of a second for each call; remembers what it was asked."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.calls: list[list[int]] = []
        self.is_closed = False

    def generate(self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> tuple[float, list[list[int]]]:
        self.calls.append([len(prompts), *output_lens])
        return 0.1, []

    def close(self) -> None:
        self.is_closed = True


def as_process(engine: Engine) -> EngineProcess:
    return cast(EngineProcess, engine)


def test_requests_are_sent_one_by_one_or_together() -> None:
    load = Traffic(3, (2, 4), 5, at_once=False).draw(random.Random(0), 100)
    assert {len(prompt) for prompt in load} <= {2, 3, 4}
    apart, together = Engine(), Engine()
    assert tokens_per_s(as_process(apart), Traffic(3, (2, 4), 5, False), load) == pytest.approx(50.0)
    assert tokens_per_s(as_process(together), Traffic(3, (2, 4), 5, True), load) == pytest.approx(150.0)
    assert apart.calls == [[1, 5]] * 3
    assert together.calls == [[3, 5, 5, 5]]


def test_a_round_to_warm_up_does_not_count() -> None:
    class Warming(Engine):
        def generate(self, prompts: Any, output_lens: Any) -> tuple[float, list[list[int]]]:
            super().generate(prompts, output_lens)
            return (0.001 if len(self.calls) == 1 else 0.5), []

    engine = Warming()
    assert measure(as_process(engine), Traffic(1, (2, 2), 4, True), 100, repeats=2) == pytest.approx(8.0)
    assert len(engine.calls) == 3


def test_who_fails_leaves_the_others_rows() -> None:
    engines: dict[str, EngineProcess | EngineFailedError] = {peer.name: as_process(Engine(peer.name)) for peer in PEERS}
    pagefleet = Engine("pagefleet")
    engines["pagefleet"] = as_process(pagefleet)
    engines["generate, static batch"] = EngineFailedError("no memory")
    told: list[list[str]] = []

    def rate(engine: EngineProcess, traffic: str) -> float:
        assert engine.name in ("pagefleet", *engines)  # type: ignore[attr-defined]
        if engine is engines["continuous batching"]:
            assert pagefleet.is_closed
            raise EngineFailedError("it ended")
        return 30.0 if engine is engines["pagefleet"] else 10.0

    figures = compare(engines, rate, lambda found: told.append(list(found)))
    assert figures["generate, one by one"]["pagefleet_over_peer"] == 3.0
    assert figures["static cache, compiled"]["pagefleet_over_peer"] == 3.0
    assert figures["generate, static batch"] == {"failed": "no memory"}
    assert figures["continuous batching"] == {"failed": "it ended"}
    assert [len(names) for names in told] == [3, 4, 5, 6]


def test_without_pagefleet_there_is_nothing_to_compare() -> None:
    with pytest.raises(EngineFailedError, match="gone"):
        compare({"pagefleet": EngineFailedError("gone")}, lambda engine, traffic: 1.0, lambda figures: None)


@pytest.mark.parametrize("tiny", [True, False])
def test_every_way_has_a_process_and_a_goal(tiny: bool) -> None:
    found: list[EngineSpec] = specs(tiny)
    assert [spec.name for spec in found] == ["pagefleet", *(peer.name for peer in PEERS)]
    assert {peer.traffic for peer in PEERS} == set(traffics(tiny))
    assert all(spec.options.get("device") == ("cpu" if tiny else None) for spec in found)
    figures: Figures = {peer.name: {"pagefleet_over_peer": 2.0} for peer in PEERS}
    goals = next(part.goals for part in second_parts(Path("c"), Path("f")) if part.name == "transformers")
    assert [goal.read(figures) for goal in goals] == [2.0] * len(PEERS)
