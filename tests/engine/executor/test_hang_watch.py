"""Which ranks the signs of all say hang, and which they never do."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
from msgspec import structs
from pagefleet_engine.executor.hang_watch import HANG_S, LOOK_S, STAGE_HANG_S, HangWatch
from pagefleet_engine.executor.pace import MARGIN, DevicePace, Pace
from pagefleet_engine.executor.vital_signs import STAMP_S, Awaited, OwnSigns, Signs, VitalSigns, make_signs

IDLE, SILENT = "has done nothing within a step", "gave no sign of life"
AWAITED, LONG = "did not come to the other ranks of its stage", "did not come out of a step"
LAYER = "did not come out of a layer"


def signs(now: float, *launched: int) -> list[Signs]:
    return [Signs(now, now, Awaited.EXECUTOR, 0.0, steps, steps) for steps in launched]


def look_each_second(watch: HangWatch, start: int, seconds: int, *launched: int, stopped: int = -1) -> object:
    for now in range(start, start + seconds):
        told = signs(now, *launched)
        if stopped >= 0:
            told[stopped] = told[stopped].moved(start - now)
        if (found := watch.look(told, now)) is not None:
            return now - start, *found
    return None


def test_ranks_that_stamp_and_are_level_are_well() -> None:
    assert look_each_second(HangWatch(2), 100, 60, 7, 7) is None


def test_a_rank_without_stamps_hangs() -> None:
    assert look_each_second(HangWatch(2), 100, 60, 7, 7, stopped=1) == (9, 1, f"{SILENT} for 9 s")


def test_a_rank_that_others_leave_behind_hangs() -> None:
    assert look_each_second(HangWatch(3), 100, 60, 8, 7, 8) == (9, 1, f"{LONG} for 9 s")


def test_a_rank_that_is_behind_and_moves_is_well() -> None:
    watch = HangWatch(2)
    for now in range(100, 200):
        assert watch.look(signs(now, now, now - 1), now) is None


def test_stages_are_steps_apart() -> None:
    """A stage may take long where the one before it is done with more; its own tensor ranks are level."""

    def watch(abreast: int) -> HangWatch:
        made = HangWatch(abreast)
        made.num_given = 9
        return made

    assert look_each_second(watch(1), 100, 60, 9, 7) is None
    assert look_each_second(watch(1), 100, 90, 9, 7) == (61, 1, f"{LONG} for 61 s")
    assert look_each_second(watch(2), 100, 60, 9, 9, 7, 7) is None
    assert look_each_second(watch(2), 100, 60, 9, 9, 7, 6) == (9, 3, f"{LONG} for 9 s")


def test_the_first_stage_hangs_where_all_others_wait_for_it() -> None:
    watch = HangWatch(2)
    watch.num_given = 7
    assert look_each_second(watch, 100, 90, 7, 7, 7, 7) is None
    watch.num_given = 9
    assert look_each_second(watch, 190, 60, 7, 7, 7, 7) is None
    assert look_each_second(watch, 250, 5, 7, 7, 7, 7) == (1, 0, f"{LONG} for 61 s")


def test_who_was_stopped_itself_blames_nobody() -> None:
    watch = HangWatch(2)
    watch.look(signs(100.0, 1, 1), 100.0)
    assert watch.look(signs(100.0, 1, 1), 500.0) is None
    assert watch.look([*signs(501.0, 1), *signs(100.0, 1)], 501.0) is None
    assert watch.is_due(502.0)


def test_a_rank_that_burns_longer_than_a_layer_takes_hangs() -> None:
    def found_at(patience: float | None, burns: float) -> object:
        watch = HangWatch(1)
        watch.num_given = 1
        for now in range(100, 155):
            sign = Signs(now, now, Awaited.NOBODY, 100.0, 0, 0, 0, patience, burns * (now - 100))
            if (found := watch.look([sign], now)) is not None:
                return now - 100, *found
        return None

    assert found_at(0.1, burns=1.0) == (9, 0, f"{LAYER} for 9 s")
    assert found_at(30.0, burns=4.0) == (31, 0, f"{LAYER} for 31 s")
    assert found_at(0.1, burns=0.2) is None, "others have the processor"
    assert found_at(None, burns=1.0) is None, "nobody knows how long its layers take"


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_layers_are_told_by_another_clock_too(seconds: float) -> None:
    told = Signs(7.0, 6.0, Awaited.TENSOR, 5.0, 4, 3, 2, 1.0, 9.0)
    assert told.moved(seconds) == Signs(7.0 + seconds, 6.0 + seconds, Awaited.TENSOR, 5.0 + seconds, 4, 3, 2, 1.0, 9.0)


def test_pace_is_that_of_steps_as_large() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    pace = Pace(own, lambda on_layer: 2)

    def patience() -> float | None:
        return ours.read()[0].patience_s

    pace.begin(8)
    assert patience() is None
    pace.layer()
    (after,) = ours.read()
    assert after.layers == 1
    short = pace.expected_s(4)
    assert short is not None
    assert short > 0
    assert [pace.expected_s(bits) for bits in (1, 4, 5, 7)] == [short, short, None, None]
    pace.begin(8)
    assert patience() == pytest.approx(MARGIN * short)
    pace.begin(64)
    assert patience() is None, "none as large was seen"
    pace.layer()
    assert pace.expected_s(4) == short
    assert pace.expected_s(5) == pace.expected_s(7)
    pace.begin(4)
    pace.layer()
    assert patience() is not None
    pace.layer()
    assert patience() is None, "nobody knows what comes behind the last layer"


def test_a_device_has_the_pace_of_steps_as_large() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    pace = DevicePace(own)

    def patience() -> float | None:
        return ours.read()[0].device_patience_s

    pace.end()  # of a step that the host could not even launch
    pace.begin(8)
    assert patience() is None, "none was seen"
    pace.begin(64)  # is behind it, and nothing yet
    pace.end()
    assert patience() is None, "it has no step"
    pace.begin(64)
    assert patience() is None, "none as large was seen"
    pace.end()
    pace.begin(4)
    assert patience() is not None


DEVICE_STEP = Signs(0.0, 0.0, Awaited.EXECUTOR, 0.0, 8, 7, device_patience_s=0.1)
"""Of a rank that looks at its device, which has a step."""


def device_found_at(*changes: dict[str, object]) -> object:
    """Of stages of one rank, in which these are otherwise."""
    watch = HangWatch(1)
    watch.num_given = 8
    for now in range(100, 150):
        told = [structs.replace(DEVICE_STEP, stamped_at=now, worked_at=now, **change) for change in changes]
        if (found := watch.look(told, now)) is not None:
            return now - 100, *found
    return None


def test_a_device_that_has_a_step_for_longer_than_it_takes_hangs() -> None:
    assert device_found_at({}, {}) == (9, 0, f"{LONG} for 9 s")
    assert device_found_at({"device_patience_s": 30.0}, {}) == (31, 0, f"{LONG} for 31 s"), (
        "the second waits for the first"
    )
    assert device_found_at({"device_patience_s": None}, {}) is None, (
        "nobody knows how long steps take that are as large"
    )
    assert device_found_at({"finished": 8}, {}) == (9, 1, f"{LONG} for 9 s")
    assert device_found_at({}, {"finished": 5}) == (9, 1, f"{LONG} for 9 s"), "the first may wait for it"
    assert device_found_at({"finished": 8}, {"finished": 8}) is None


def test_a_host_that_compiles_is_not_its_device() -> None:
    assert device_found_at({"awaits": Awaited.NOBODY, "awaits_since": 90.0}, {}) is None
    watch = HangWatch(1)
    watch.num_given = 8
    for now in range(100, 160):  # and what it computed meanwhile is looked at late
        compiles = now % 10 < 6
        state = {"awaits": Awaited.NOBODY, "awaits_since": now - now % 10} if compiles else {}
        sign = structs.replace(DEVICE_STEP, stamped_at=now, worked_at=now, launched=100, finished=now // 10, **state)
        assert watch.look([sign], now) is None


def test_a_host_that_compiles_while_its_device_has_a_step_does_not_hang_in_a_layer() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    pace, watch = DevicePace(own), HangWatch(1)
    pace.begin(8)
    pace.end()
    own.launch()
    pace.begin(8)
    watch.num_given = 2
    for now in range(100, 155):
        (told,) = ours.read()
        times = {"stamped_at": now, "worked_at": now, "awaits_since": 100.0, "burnt_s": now - 100.0}
        assert watch.look([structs.replace(told, awaits=Awaited.NOBODY, **times)], now) is None


def test_a_stage_is_not_blamed_while_a_later_one_may_not_take_what_it_sends() -> None:
    compiles: dict[str, object] = {
        "launched": 7,
        "awaits": Awaited.NOBODY,
        "awaits_since": 90.0,
        "device_patience_s": None,
    }
    assert device_found_at({}, compiles) is None
    assert device_found_at({}, {}, compiles) is None, "the second does not take it either"
    assert device_found_at({}, compiles | {"finished": 6, "device_patience_s": 0.1}) is None
    assert device_found_at({}, {"finished": 6, "device_patience_s": None}) is None, "it may take that long"
    assert device_found_at({}, compiles | {"awaits_since": 200.0, "device_patience_s": 0.1}) == (
        9,
        0,
        f"{LONG} for 9 s",
    )


def test_a_look_at_the_device_that_is_interrupted_for_a_moment_goes_on() -> None:
    watch = HangWatch(1)
    watch.num_given = 8
    found = None
    for tick in range(200, 240):
        now = tick * LOOK_S
        state = {"awaits": Awaited.NOBODY, "awaits_since": now - 0.001} if tick % 3 == 0 else {}
        sign = structs.replace(DEVICE_STEP, stamped_at=now, worked_at=now, **state)
        found = found or watch.look([sign], now)
    assert found == (0, f"{LONG} for 8 s")


@dataclass(slots=True)
class Rank:
    """As a rank's process tells of itself: `work` seconds of the step are left, if it has one."""

    stamped_at: float = 0.0
    worked_at: float = 0.0
    awaits: Awaited = Awaited.EXECUTOR
    awaits_since: float = 0.0
    launched: int = 0
    work: float = 0.0
    fault: str = ""
    has_worked: bool = False
    burnt: float = 0.0
    patience: float | None = None

    def turn(self, awaits: Awaited, now: float) -> None:
        if self.awaits is not awaits and not self.fault:
            self.awaits, self.awaits_since = awaits, now

    def signs(self) -> Signs:
        times = (self.stamped_at, self.worked_at, self.awaits, self.awaits_since)
        return Signs(*times, self.launched, self.launched, self.launched, self.patience, self.burnt)


@dataclass(slots=True)
class Pipeline:
    """Stages of `abreast` ranks each, which pass steps on; a channel holds two. Time goes in ticks."""

    rng: random.Random
    num_stages: int
    abreast: int
    longest_s: float
    """Of a step, on one rank, which is one layer."""
    share: float = 1.0
    """Of a processor that a rank gets."""
    now: float = 1000.0
    given: int = 0
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [Rank(self.now, self.now) for _ in range(self.num_stages * self.abreast)]

    def stage(self, index: int) -> list[Rank]:
        return self.ranks[index * self.abreast : (index + 1) * self.abreast]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        if self.given < min(rank.launched for rank in self.ranks) + self.num_stages and self.rng.random() < 0.9:
            self.given += 1
        for index in range(self.num_stages):
            self._go_on(index, seconds)
        for rank in self.ranks:
            if rank.awaits is Awaited.NOBODY and rank.fault not in ("sleeps", "stopped"):
                rank.has_worked = True
                rank.burnt += self.share * seconds
            if rank.fault != "stopped" and self.now - rank.stamped_at >= STAMP_S:
                rank.stamped_at = self.now
                if rank.has_worked:
                    rank.worked_at = self.now
                rank.has_worked = False

    def _go_on(self, index: int, seconds: float) -> None:
        """A stage's ranks compute their step and meet at its end."""
        stage, step = self.stage(index), self.stage(index)[0].launched
        if stage[0].awaits in (Awaited.EXECUTOR, Awaited.STAGE):
            before = self.given if index == 0 else self.stage(index - 1)[0].launched
            whom = Awaited.EXECUTOR if self.given == step else Awaited.NOBODY if before > step else Awaited.STAGE
            work = self.rng.choice([0.05, 1.0, self.longest_s]) * self.rng.random()
            for rank in stage:
                rank.turn(whom, self.now)
                rank.work = work * self.rng.uniform(0.9, 1.0)
            return
        for rank in stage:
            if rank.awaits is Awaited.NOBODY and not rank.fault:
                rank.work -= seconds
                if rank.work <= 0:
                    rank.turn(Awaited.TENSOR, self.now)
        if all(rank.awaits is Awaited.TENSOR for rank in stage):
            for rank in stage:
                rank.launched += 1
                rank.turn(Awaited.EXECUTOR, self.now)

    def look(self, watch: HangWatch) -> tuple[int, str] | None:
        watch.num_given = self.given
        return watch.look([rank.signs() for rank in self.ranks], self.now)


SHAPES = [(1, 2), (1, 4), (2, 1), (3, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize(("num_stages", "abreast"), SHAPES)
def test_ranks_that_compute_are_never_blamed(num_stages: int, abreast: int) -> None:
    """However long, within what a step may take, and whatever waits for it; or longer than a layer took before, where
    others have the processor."""
    for seed in range(10):
        rng = random.Random(seed)
        longest = STAGE_HANG_S - 5 if abreast == 1 else 10 * HANG_S * 0.5
        pipeline, watch = Pipeline(rng, num_stages, abreast, longest, share=rng.choice([0.1, 1.0])), HangWatch(abreast)
        for rank in pipeline.ranks:
            rank.patience = rng.choice([None, longest]) if pipeline.share == 1.0 else 1.0
        for _ in range(1500):
            pipeline.tick(LOOK_S)
            assert pipeline.look(watch) is None


FAULTS = {"stopped": {SILENT}, "sleeps": {IDLE, AWAITED}, "spins": {AWAITED, LAYER}}
CASES = [(*shape, fault) for shape in SHAPES for fault in FAULTS]


@pytest.mark.parametrize(("num_stages", "abreast", "fault"), CASES)
def test_the_rank_that_hangs_in_a_step_is_blamed_within_ten_seconds(num_stages: int, abreast: int, fault: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        pipeline, watch = Pipeline(rng, num_stages, abreast, longest_s=5.0 if abreast > 1 else 1.0), HangWatch(abreast)
        for rank in pipeline.ranks:
            rank.patience = 4.0 if abreast == 1 else None
        for _ in range(100):
            pipeline.tick(LOOK_S)
            assert pipeline.look(watch) is None
        number = rng.randrange(len(pipeline.ranks))
        while pipeline.ranks[number].awaits is not Awaited.NOBODY:
            pipeline.tick(0.01)
        pipeline.look(watch)
        pipeline.ranks[number].fault = fault
        fell_at, found = pipeline.now, None
        while found is None:
            pipeline.tick(LOOK_S)
            found = pipeline.look(watch)
            limit = 10.0 if fault != "spins" or abreast == 1 else 10.0 + 5.0  # the others may have as long to compute
            assert pipeline.now - fell_at < limit
        assert found[0] == number, found
        assert found[1].rpartition(" for ")[0] in FAULTS[fault]
