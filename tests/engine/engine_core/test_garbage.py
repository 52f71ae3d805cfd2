"""Collections happen between steps and nowhere else, and garbage stays bounded under a load without a pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_engine.core.step import StepPlan
from pagefleet_engine.engine_core.garbage import GarbageSchedule
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire


class Cycle:
    """Garbage that only the collector frees."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


class Watch:
    """Notes the generation of each collection, and whether a step was running."""

    def __init__(self) -> None:
        self.in_step = False
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.seen.append((info["generation"], self.in_step))


@pytest.fixture
def watch() -> Iterator[Watch]:
    """The process as the core's is after its start, and again as it was afterwards."""
    watch = Watch()
    GarbageSchedule().take_over()
    gc.callbacks.append(watch)
    Cycle.alive = 0
    yield watch
    gc.callbacks.remove(watch)
    gc.unfreeze()
    gc.freeze()  # what pytest has collected, as conftest.py left it
    gc.enable()


def test_taking_over_ends_collections_of_pythons_own(watch: Watch) -> None:
    for _ in range(20_000):
        Cycle()
    assert watch.seen == []
    assert Cycle.alive == 20_000


def test_few_new_objects_are_no_reason_to_collect(watch: Watch) -> None:
    for _ in range(100):
        Cycle()
        GarbageSchedule().between_steps()
    assert watch.seen == []


def test_older_generations_are_collected_more_rarely(watch: Watch) -> None:
    schedule = GarbageSchedule(new_objects=100, younger_runs=3)
    for _ in range(40):
        for _ in range(120):
            Cycle()
        schedule.between_steps()
    generations = [generation for generation, _ in watch.seen]
    assert len(generations) == 40
    assert generations.count(0) > generations.count(1) > generations.count(2) > 0
    assert Cycle.alive == 0


def test_no_collection_starts_inside_a_step_and_garbage_stays_bounded(tmp_path: Path, watch: Watch) -> None:
    most_alive = 0

    def step(plan: StepPlan) -> None:
        nonlocal most_alive
        watch.in_step = True
        for _ in range(2_000):
            Cycle()
        most_alive = max(most_alive, Cycle.alive)

    wire = Wire(tmp_path, before=step)
    receive = wire.receive

    def turn_begins(timeout_s: float) -> list[tuple[int, bytes]]:
        assert not watch.in_step
        return receive(timeout_s)

    wire.receive = turn_begins  # type: ignore[method-assign]
    update = wire.core.step

    def watched_step() -> object:
        outputs = update()
        watch.in_step = False  # results are in: what comes now is between steps
        return outputs

    wire.core.step = watched_step  # type: ignore[method-assign, assignment]
    wire.turn(AddRequest("a", [5], SamplingParams(max_tokens=200, ignore_eos=True), ()))
    while wire.core.has_work:
        wire.turn()
    assert len(watch.seen) > 30
    assert not any(in_step for _, in_step in watch.seen)
    assert most_alive < 20_000
    wire.turn()
    assert watch.seen[-1] == (2, False)  # the idle moment
    assert Cycle.alive == 0
    wire.reader.close()


@pytest.mark.parametrize("collects", [True, False])
def test_a_loop_in_another_process_leaves_its_collector_as_it_was(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with GarbageSchedule().paused():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
