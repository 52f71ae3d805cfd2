"""Data ranks that step together: nobody steps alone, nobody is waited for in vain, no request is lost."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.dual_batch import DualBatch
from pagefleet_engine.core.step import CommonStep, StepPlan
from pagefleet_engine.engine_core.data_group import DataGroup
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.engine_core.waves import AGREE_EVERY, Waves
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.ranks.copies import CopyGroups
from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.parallelism import WHOLE, Parallelism
from pagefleet_engine.ranks.together import TogetherHandles, make_together
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.scripted_core import scripted_core

NUM_STEPS = 10_000
RULES = DualBatch(decode_token_threshold=2, prefill_token_threshold=6)


def several(size: int, *, in_halves: bool = False) -> Parallelism:
    return Parallelism(data_parallel_size=size, enable_expert_parallel=in_halves, enable_dbo=in_halves)


@contextlib.contextmanager
def shared(size: int) -> Iterator[TogetherHandles]:
    handles = make_together(several(size))
    try:
        yield handles
    finally:
        handles.close()


class Rank:
    """A real core over a scripted worker, whose every step meets those of the other ranks."""

    def __init__(
        self,
        handles: TogetherHandles,
        index: int,
        max_in_flight: int = 1,
        rules: DualBatch | None = None,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.index = index
        self.random = random.Random(index)
        self.steps = self.num_empty = 0
        self.open: set[str] = set()
        self.num_asked = 0
        self.error: Exception | None = None
        self.bell = Doorbell(handles.bells[index])
        self.copies = CopyGroups(handles.of_rank(index, 0), WHOLE)
        parallel = several(len(handles.bells), in_halves=rules is not None)
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
        config = EngineConfig(model=ModelConfig(model="fake"), scheduler=scheduler)
        self.core: EngineCore = scripted_core(config, self._meet, max_in_flight=max_in_flight)
        self.num_halved = 0
        self._rules = rules
        self._decides_alone = rules is None and not on_gpu
        self.core.step_together(DataGroup(handles, index, on_gpu=on_gpu).waves(parallel), rules)
        self.copies.end_loading(9.0)

    def _meet(self, plan: StepPlan) -> None:
        """What the layers exchange: all must be at the same step, and know of it what holds for all."""
        self.steps += 1
        self.num_empty += not plan.num_tokens
        self.num_halved += plan.in_halves
        new, common = plan.rows.new, plan.common
        divides = self._rules is not None and self._rules.divides(new)
        at = torch.tensor([self.steps, -self.steps, not divides, plan.num_tokens, max([*new, 1])])
        self.copies.data.all_reduce(at, "max")
        is_whole, most, longest = at.tolist()[2:]
        assert at.tolist()[:2] == [self.steps, -self.steps], "the ranks are at different steps"
        assert (common is None) == self._decides_alone
        assert plan.in_halves == (not is_whole)
        assert common is None or (common.num_tokens, common.is_uniform) == (most, longest == 1)

    def ask(self) -> None:
        self.num_asked += 1
        request_id = f"{self.index}.{self.num_asked}"
        sampling = SamplingParams(max_tokens=self.random.choice((1, 2, 40)), ignore_eos=True)
        prompt = [self.random.randrange(200) for _ in range(self.random.choice((1, 5, 70)))]
        self.open.add(request_id)
        assert not self.core.add(AddRequest(request_id, prompt, sampling, ()))

    def turn(self) -> None:
        """What the core's loop does."""
        if not self.core.has_work:
            self.bell.wait(0.002)
            return
        for output in self.core.step():
            if output.finish_reason is not None:
                assert output.finish_reason == "length"
                self.open.remove(output.request_id)


def run(ranks: list[Rank], script: str) -> None:
    """Run each in a thread, with requests that come at any moment, until all is answered and still."""
    still = [threading.Event() for _ in ranks]

    def live(rank: Rank) -> None:
        try:
            while rank.steps < NUM_STEPS:
                busy = rank.core.has_work
                if rank.random.random() < (0.05 if busy else 0.3) and (script == "all" or rank.index == 0):
                    rank.ask()
                rank.turn()
            while not all(event.is_set() for event in still):
                rank.turn()
                if not rank.open and not rank.core.has_work:
                    still[rank.index].set()
        except Exception as error:
            rank.error = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "the ranks wait for each other for ever"


@pytest.mark.parametrize(("script", "max_in_flight"), [("all", 1), ("all", 2), ("one", 1), ("one", 3)])
def test_ten_thousand_steps_with_ranks_that_have_nothing(script: str, max_in_flight: int) -> None:
    with shared(3) as handles:
        ranks = [Rank(handles, index, max_in_flight, RULES, on_gpu=max_in_flight > 1) for index in range(3)]
        run(ranks, script)
        assert [rank.error for rank in ranks] == [None] * 3
        assert not any(rank.open for rank in ranks)
        assert len({rank.steps for rank in ranks}) == 1
        assert len({rank.num_halved for rank in ranks}) == 1
        assert (ranks[0].num_halved > 10) == (script == "all")
        assert ranks[0].num_asked > 100
        empty = [rank.num_empty for rank in ranks]
        assert all(empty)
        if script == "one":
            assert empty[1] == empty[2] == ranks[1].steps


def test_a_rank_that_dies_in_a_wave_ends_those_that_wait_for_it() -> None:
    with shared(2) as handles:
        ranks = [Rank(handles, index) for index in range(2)]
        ranks[0].ask()
        one_step = threading.Thread(target=step_once, args=(ranks[1],))
        one_step.start()
        step_once(ranks[0])
        one_step.join(60)
        for rank in ranks:
            rank.copies.end_loading(0.2)
        with pytest.raises(EngineDead, match=r"others compute too: RuntimeError: waited 0\.2 s for rank 1"):
            repeat(ranks[0].turn)
        with pytest.raises(EngineDead, match=r"others compute too: RuntimeError: waited 0\.2 s for rank 0"):
            repeat(ranks[1].turn)


def step_once(rank: Rank) -> None:
    while not rank.steps:
        rank.turn()


def repeat(step: Callable[[], None]) -> None:
    for _ in range(2 * AGREE_EVERY):
        step()


class Board:
    """Calls of one rank, and of others that the test plays."""

    bell = -1

    def __init__(self) -> None:
        self.others = 0
        self.called: list[int] = []

    def call(self, wave: int) -> None:
        self.called.append(wave)

    def newest(self) -> int:
        return max([self.others, *self.called])


OWN = CommonStep(num_tokens=3, is_uniform=False)


def test_a_wave_ends_where_all_have_run_dry_and_a_call_begins_the_next() -> None:
    board, asked = Board(), list[bool]()
    others_have_work = [True, False, False]

    def agree(has_work: bool) -> bool:
        asked.append(has_work)
        return has_work or others_have_work.pop(0)

    waves = Waves(board, agree)
    assert [waves.is_due] == [False]
    board.others = 1
    due = []
    for _ in range(2 * AGREE_EVERY):
        due.append(waves.is_due)
        assert waves.begin(OWN) is None
        waves.stepped(has_work=False)
    assert all(due)
    assert asked == [False, False]
    assert [waves.is_due] == [False]
    waves.begin(OWN)
    waves.stepped(has_work=True)
    assert board.called == [2]
    for _ in range(AGREE_EVERY - 1):
        waves.begin(OWN)
        waves.stepped(has_work=False)
    assert not waves.is_due
    assert board.called == [2], "who takes part in another's wave calls for none"


STEPS = st.builds(CommonStep, num_tokens=st.integers(0, 99), is_uniform=..., is_cascade=..., in_halves=...)


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_what_holds_for_all_ranks_is_the_largest_of_their_numbers(ranks: list[CommonStep]) -> None:
    found = CommonStep.of([max(place) for place in zip(*(own.numbers() for own in ranks), strict=True)])
    assert found == CommonStep(
        num_tokens=max(own.num_tokens for own in ranks),
        is_uniform=all(own.is_uniform for own in ranks),
        is_cascade=any(own.is_cascade for own in ranks),
        in_halves=all(own.in_halves for own in ranks),
    )
