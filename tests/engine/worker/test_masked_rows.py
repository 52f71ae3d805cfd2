"""Rows that wait for their masks: sampled by a second call, apart from the others, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pagefleet_engine.core.step import FailureKind, NewRow, ScheduledRow, ScheduledRows, StepMasks, StepPlan, StepResult
from pagefleet_engine.errors import StepOutOfMemory
from pagefleet_engine.worker.model_runner import ModelRunner
from pagefleet_engine.worker.sampler import Sampler
from pagefleet_kernels.dispatch import Backend
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.markov_model import BLOCK_SIZE, MarkovModel, make_runner

VOCAB = 40
TABLE_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
GREEDY = SamplingParams(temperature=0.0)


def masks(**allowed: Sequence[int]) -> StepMasks:
    """`r2=[5, 6]`: row 2 may sample these tokens."""
    words_RW = np.zeros((len(allowed), 2), dtype=np.uint32)
    for row, tokens in enumerate(allowed.values()):
        for token in tokens:
            words_RW[row, token // 32] |= np.uint32(1 << (token % 32))
    return StepMasks([int(name[1:]) for name in allowed], words_RW.view(np.int32))


def best(token: int, allowed: Sequence[int]) -> int:
    return max(allowed, key=lambda candidate: float(TABLE_VV[token, candidate]))


def words(**allowed: Sequence[int]) -> NDArray[np.int32]:
    return masks(**allowed).allowed


class Scene:
    """Requests of one token of prompt each, named by their place."""

    def __init__(self, *samplings: SamplingParams, kernels: Backend | None = None) -> None:
        self.runner: ModelRunner = make_runner(MarkovModel(TABLE_VV.clone()), kernels=kernels)
        self.new = [NewRow(str(place), [place + 3], 1, sampling, ()) for place, sampling in enumerate(samplings)]

    def step(self, at: int, masked: Sequence[int], masks: StepMasks | None, **more: object) -> StepResult:
        """Compute the token number `at` of each."""
        new = self.new if at == 0 else ()
        rows = ScheduledRows.of(
            [
                ScheduledRow(str(place), at, 1, ((range(place * 9, place * 9 + 9),) if at == 0 else ()), True)
                for place in range(len(self.new))
            ]
        )
        return self.runner.execute(StepPlan(at, (), new, rows, len(rows), 0, masked, **more), masks)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", [None, "triton"])
def test_what_may_come_if_it_is_the_likeliest_comes_only_then(kernels: Backend | None) -> None:
    """Row 0's likeliest token of all is one of those, row 1's is another, row 2 has none."""
    likeliest = [best(place + 3, range(VOCAB)) for place in range(3)]
    asked = masks(r0=[7], r1=[8], r2=[9])
    second = sorted(range(VOCAB), key=lambda token: -float(TABLE_VV[4, token]))[1]
    more = words(r0=[likeliest[0], 30], r1=[second], r2=[])
    result = Scene(GREEDY, GREEDY, GREEDY, kernels=kernels).step(0, [0, 1, 2], replace(asked, if_likeliest=more))
    assert result.sampled == [(likeliest[0],), (8,), (9,)]


@pytest.mark.parametrize("kernels", [None, "triton"])
def test_masked_rows_are_sampled_beside_the_others(kernels: Backend | None) -> None:
    scene = Scene(GREEDY, GREEDY, GREEDY, kernels=kernels)
    result = scene.step(0, [0, 2], masks(r0=[7, 33], r2=[8]))
    everything = range(VOCAB)
    assert result.sampled == [(best(3, [7, 33]),), (best(4, everything),), (8,)]
    after = scene.step(1, [0, 1, 2], masks(r0=everything, r1=[1, 2], r2=[39]))
    tokens = [tokens[0] for tokens in result.sampled]
    assert after.sampled == [(best(tokens[0], everything),), (best(tokens[1], [1, 2]),), (39,)]


def test_a_row_without_a_mask_sits_out_and_is_computed_again() -> None:
    scene = Scene(GREEDY, GREEDY)
    assert scene.step(0, [0, 1], masks(r1=[9])).sampled == [(), (9,)]
    rows = [ScheduledRow("0", 0, 1, (), True), ScheduledRow("1", 1, 1, (), True)]
    result = scene.runner.execute(StepPlan(1, (), (), ScheduledRows.of(rows), 2, 0, [0]), masks(r0=[6, 7]))
    assert result.sampled == [(best(3, [6, 7]),), (best(9, range(VOCAB)),)]


def test_a_step_in_which_all_sit_out_gives_nothing() -> None:
    scene = Scene(GREEDY)
    assert scene.step(0, [0], masks()).sampled == [()]


def test_no_room_to_sample_masked_rows_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    scene = Scene(GREEDY, GREEDY)
    rows = [ScheduledRow(str(place), 0, 1, (range(place * 9, place * 9 + 9),), True) for place in range(2)]
    launched = scene.runner.launch(StepPlan(0, (), scene.new, ScheduledRows.of(rows), 2, 0, [0]))
    monkeypatch.setattr(Sampler, "sample", no_room)
    with pytest.raises(StepOutOfMemory, match="of 1 masked rows"):
        launched.sample(masks(r0=[7]))
    assert launched.result().sampled == [(), (best(4, range(VOCAB)),)]


def test_forced_tokens_are_told_and_counted() -> None:
    penalised = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    scene = Scene(penalised)
    assert scene.step(0, [0], masks()).sampled == [()]
    rows = [ScheduledRow("0", 1, 3, (), True)]
    result = scene.runner.execute(StepPlan(1, (), (), ScheduledRows.of(rows), 3, told={"0": [11, 12, 11]}))
    once, twice = TABLE_VV[11].clone(), 11
    once[12] -= 2.0 + 2.0
    once[twice] -= 2.0 + 2 * 2.0
    assert result.sampled == [(int(once.argmax()),)]


def test_what_a_mask_bans_no_bias_brings_back_and_logprobs_are_the_models() -> None:
    biased = SamplingParams(temperature=0.0, logit_bias={5: 100.0, 7: 1.0}, repetition_penalty=0.5, logprobs=2)
    scene = Scene(biased)
    result = scene.step(0, [0], masks(r0=[7, 8]))
    (token,) = result.sampled[0]
    assert token in (7, 8)
    (entry,) = result.logprobs["0"]
    logprobs = TABLE_VV[3].log_softmax(0)
    assert entry.token_ids == [token, *logprobs.topk(2).indices.tolist()]
    assert entry.logprobs == pytest.approx(logprobs[entry.token_ids].tolist(), abs=1e-5)


@pytest.mark.parametrize("kernels", [None, "triton"])
def test_a_mask_that_meets_other_bans_may_leave_nothing(kernels: Backend | None) -> None:
    scene = Scene(SamplingParams(allowed_token_ids=(5, 6)), GREEDY, kernels=kernels)
    result = scene.step(0, [0, 1], masks(r0=[7], r1=[7]))
    assert result.failed == {"0": FailureKind.NOTHING_LEFT}
    assert result.sampled[1] == (7,)


def test_a_seeded_row_draws_the_same_token_masked_or_not() -> None:
    seeded = SamplingParams(seed=11, top_p=0.8)
    plain, masked = Scene(seeded, GREEDY), Scene(seeded, GREEDY)
    expected = [plain.step(at, (), None).sampled[0] for at in range(4)]
    assert [masked.step(at, [0], masks(r0=range(VOCAB))).sampled[0] for at in range(4)] == expected
    assert BLOCK_SIZE == 4, "the tables above are long enough"
