"""What stages of a pipeline give each other, where all is well and where a step fails in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepPlan
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.executor.ring import make_ring
from pagefleet_engine.executor.ring_channel import RingInlet, RingOutlet
from pagefleet_engine.ranks.group import RankGroup, TorchGroup
from pagefleet_engine.ranks.stages import Inlet, Outlet, Stage, StageLinks
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from tests.fakes.markov_model import MarkovModel, make_runner
from tests.fakes.ranks import on_ranks

VOCAB_SIZE = 8
SENT = torch.arange(6.0).view(3, 2)


def through_a_ring(send: Callable[[Outlet], None], receive: Callable[[Inlet], None]) -> None:
    handles = make_ring(1, 4096)
    send(RingOutlet(handles))
    receive(RingInlet(handles))
    for fd in handles.fds:
        os.close(fd)


def through_gloo(send: Callable[[Outlet], None], receive: Callable[[Inlet], None]) -> None:
    def work(group: RankGroup) -> None:
        assert isinstance(group, TorchGroup)
        links = group.links()
        if links.outlet is not None:
            send(links.outlet)
        if links.inlet is not None:
            receive(links.inlet)

    on_ranks(2, work)


@pytest.mark.parametrize("through", [through_a_ring, through_gloo])
def test_hidden_states_come_with_their_step_and_those_of_another_end_the_engine(
    through: Callable[[Callable[[Outlet], None], Callable[[Inlet], None]], None],
) -> None:
    def send(outlet: Outlet) -> None:
        outlet.send(7, SENT)
        outlet.send(8, SENT)

    def receive(inlet: Inlet) -> None:
        into = torch.empty(3, 2)
        inlet.receive(7, into)
        assert torch.equal(into, SENT)
        with pytest.raises(EngineDead, match="step 9 was to come from the stage before, not 8"):
            inlet.receive(9, into)

    through(send, receive)


class Notes:
    """Implements `Inlet` and `Outlet`: which steps came, and which were sent."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.sent: list[tuple[int, Tensor]] = []

    def receive(self, step_id: int, into: Tensor) -> None:
        self.came.append(step_id)
        into.zero_()

    def send(self, step_id: int, x: Tensor) -> None:
        self.sent.append((step_id, x.clone()))


def test_a_step_that_a_stage_cannot_even_begin_still_passes_it() -> None:
    notes = Notes()
    stage = Stage(StageLinks(notes, notes), torch.empty(256, VOCAB_SIZE))
    runner = make_runner(MarkovModel(torch.rand(VOCAB_SIZE, VOCAB_SIZE)), stage=stage)
    new = NewRow("a", (1, 2), 2, SamplingParams(), ())
    rows = ScheduledRows.of([ScheduledRow("a", 0, 2, ((0,),), True)])
    of_nobody = ScheduledRows.of([ScheduledRow("b", 0, 2, ((0,),), True)])
    stage.begin(3)
    for plan in (StepPlan(4, (), [], of_nobody, 2), StepPlan(5, (), [new, new], rows, 2)):
        with pytest.raises(Exception, match=r"b|a"):
            runner.launch(plan)
        runner.give_up(plan)
    assert notes.came == [4, 5]
    assert [step_id for step_id, _ in notes.sent] == [4, 5]
    assert all(x.shape == (2, VOCAB_SIZE) and x.isnan().all() for _, x in notes.sent)
