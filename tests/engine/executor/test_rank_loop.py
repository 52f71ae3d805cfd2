"""What a rank tells of its device, whose steps it takes as they are computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from pagefleet_engine.core.step import ScheduledRows, StepPlan
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.executor.messages import Launch, Loaded, encode
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
