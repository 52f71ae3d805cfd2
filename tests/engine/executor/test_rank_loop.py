"""What a rank tells of its device, whose steps it takes as they are computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from pagefleet_engine.core.step import ScheduledRows, StepPlan
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.executor.messages import Carry, Launch, Loaded, encode
from pagefleet_engine.executor.rank_loop import BuiltRank, RankLoop, wait_on
from pagefleet_engine.executor.ring import RingReader, RingWriter, make_ring_pair
from pagefleet_engine.executor.trace import ThreadTrace
from pagefleet_engine.executor.vital_signs import OwnSigns, VitalSigns, make_signs
from pagefleet_engine.ranks.parallelism import RankPart

LOADED = Loaded("", 1, 1, 1, 1, "", "", 1, 1, {})


class DeviceWorker:
    """A GPU that computes one step, and has the second when its process ends."""

    idle_seconds = 0.0
    expert_load = None

    def __init__(self, *, steps_together: bool) -> None:
        self.steps_together = steps_together

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        if plan.step_id == 2:
            raise EngineDead("the end")
        return SimpleNamespace(is_computed=plan.step_id == 0, result=lambda: None)

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int:
        return 0


@pytest.mark.parametrize("steps_together", [False, True])
def test_a_device_is_paced_where_its_steps_wait_for_no_other_copys(steps_together: bool) -> None:
    memory, rings = make_signs(1), make_ring_pair(1 << 14)
    commands = RingWriter(rings.there)
    for step_id in range(3):
        commands.send(encode(Launch(StepPlan(step_id, (), [], ScheduledRows.of([]), 4))), wait_on)
    signs = OwnSigns(memory, 1, 0)
    loop = RankLoop(
        RankPart(0, 2),
        BuiltRank(DeviceWorker(steps_together=steps_together), LOADED, lambda: None),  # type: ignore[arg-type]
        RingReader(rings.there),
        RingWriter(rings.back),
        signs,
        ThreadTrace(""),
    )
    with pytest.raises(EngineDead):
        loop.run()
    (told,) = VitalSigns(memory, 1).read()
    assert (told.launched, told.finished) == (2, 1)
    assert (told.device_patience_s is None) == steps_together


class Transfer:
    """One that is over as soon as it is waited for, and notes that."""

    is_over = False

    def __init__(self, turn: int, seen: list[str]) -> None:
        self._turn, self._seen = turn, seen
        seen.append(f"begin {turn}")

    def wait(self) -> None:
        self._seen.append(f"wait {self._turn}")
        self.is_over = True


class NotingWorker(DeviceWorker):
    """Notes what it launches."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(steps_together=False)
        self._seen = seen

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        self._seen.append(f"step {plan.step_id}")
        return super().launch(plan)


def test_transfers_between_two_steps_are_launched_beside_each_other_and_the_next_step_behind_all() -> None:
    memory, rings, seen = make_signs(1), make_ring_pair(1 << 14), list[str]()
    commands = RingWriter(rings.there)
    steps = [Launch(StepPlan(step_id, (), [], ScheduledRows.of([]), 4)) for step_id in range(3)]
    five, of_another, six, seven = (Carry("nccl", turns) for turns in ({0: 5}, {1: 1}, {0: 6}, {0: 7}))
    for command in (steps[0], five, of_another, six, steps[1], seven, steps[2]):
        commands.send(encode(command), wait_on)

    def carry(command: Carry) -> Transfer | None:
        return Transfer(command.turns[0], seen) if 0 in command.turns else None

    built = BuiltRank(NotingWorker(seen), LOADED, lambda: None, carry)  # type: ignore[arg-type]
    replies, signs = RingWriter(rings.back), OwnSigns(memory, 1, 0)
    with pytest.raises(EngineDead):
        RankLoop(RankPart(), built, RingReader(rings.there), replies, signs, ThreadTrace("")).run()
    assert seen == ["step 0", "begin 5", "begin 6", "wait 5", "wait 6", "step 1", "begin 7", "wait 7", "step 2"]
