"""Every edit of the logits against its definition, alone and together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.logits import EditedRow, LogitEdits, RowEdits, penalised
from pagefleet_engine.worker.sampling_table import TokenCounts
from pagefleet_kernels.sampling_edits import History
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from tests.example_counts import examples

CPU = torch.device("cpu")
VOCAB_SIZE = 12
EOS = 3


def entry(sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> NewRow:
    return NewRow("r", (*prompt, *output), len(prompt), sampling, (EOS,))


class Batch:
    """Requests in the slots of their order, their tokens and counts; row r of the logits is slot `len - 1 - r`."""

    def __init__(self, entries: Sequence[NewRow]) -> None:
        self.tokens_SM = torch.zeros((len(entries), 64), dtype=torch.int32)
        self.counts = TokenCounts(len(entries), VOCAB_SIZE, CPU)
        self.lens = np.array([len(new.token_ids) for new in entries])[::-1].copy()
        rows = []
        for slot, new in enumerate(entries):
            self.tokens_SM[slot, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int32)
            if penalised(new):
                seen = new.token_ids[: new.num_prompt_tokens] if new.sampling.repetition_penalty != 1.0 else ()
                self.counts.add(slot, seen, new.token_ids[new.num_prompt_tokens :])
            if RowEdits.needed(new):
                edits = RowEdits(new, VOCAB_SIZE, CPU)
                rows.append(EditedRow(len(entries) - 1 - slot, edits, self.counts.row(slot)))
        self.edits = LogitEdits(rows, VOCAB_SIZE, CPU)

    def apply(self) -> Tensor:
        slots_R = torch.arange(len(self.lens) - 1, -1, -1)
        history = History(self.tokens_SM, slots_R, torch.from_numpy(self.lens.astype(np.int32)))
        return self.edits.apply(plain().repeat(len(self.lens), 1), self.counts.table, history, self.lens)


def edited(sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> list[float]:
    """Logits -4.5, -3.5, ... after the edits of a request with this output, between two that ask for nothing."""
    nothing = entry(SamplingParams())
    logits_RV = Batch([nothing, entry(sampling, prompt, output), nothing]).apply()
    assert torch.equal(logits_RV[0], plain())
    assert torch.equal(logits_RV[2], plain())
    values: list[float] = logits_RV[1].tolist()
    return values


def plain() -> Tensor:
    return torch.arange(VOCAB_SIZE, dtype=torch.float32) - 4.5


def banned(values: Sequence[float]) -> set[int]:
    return {token for token, value in enumerate(values) if value == -math.inf}


def test_a_request_that_asks_for_nothing_needs_no_edits() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=3, top_p=0.2, min_p=0.1, seed=1, stop_token_ids=(4,), logprobs=2)
    assert not RowEdits.needed(entry(sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(bad_words_token_ids=((1,),)),
        SamplingParams(min_tokens=1),
    ],
)
def test_each_parameter_alone_needs_edits(sampling: SamplingParams) -> None:
    assert RowEdits.needed(entry(sampling))


def test_only_allowed_ids_remain_and_keep_their_logits() -> None:
    values = edited(SamplingParams(allowed_token_ids=(7, 2, 7, 99)))
    assert {token: value for token, value in enumerate(values) if value > -math.inf} == {2: -2.5, 7: 2.5}


def test_no_allowed_id_of_the_vocabulary_leaves_nothing() -> None:
    assert banned(edited(SamplingParams(allowed_token_ids=(VOCAB_SIZE, 99)))) == set(range(VOCAB_SIZE))


def test_bias_is_added_and_ids_outside_the_vocabulary_are_ignored() -> None:
    values = edited(SamplingParams(logit_bias={2: 100.0, 5: -1.5, VOCAB_SIZE: 4.0}))
    expected = plain()
    expected[2] += 100.0
    expected[5] -= 1.5
    assert values == expected.tolist()


def test_bias_does_not_bring_back_what_is_banned() -> None:
    sampling = SamplingParams(allowed_token_ids=(1, 2), bad_words_token_ids=((2,),), logit_bias={2: 100.0, 5: 100.0})
    assert banned(edited(sampling)) == set(range(VOCAB_SIZE)) - {1}


def test_single_bad_words_are_always_banned_and_longer_ones_when_begun() -> None:
    sampling = SamplingParams(bad_words_token_ids=((4,), (5, 6), (5, 7, 8), (6, 99)))
    assert banned(edited(sampling)) == {4}
    assert banned(edited(sampling, prompt=(5,))) == {4}
    assert banned(edited(sampling, output=(1, 5))) == {4, 6}
    assert banned(edited(sampling, output=(5, 7))) == {4, 8}
    assert banned(edited(sampling, output=(5, 7, 1))) == {4}


def test_ends_are_banned_until_min_tokens_are_out() -> None:
    sampling = SamplingParams(min_tokens=2, max_tokens=9, stop_token_ids=(8, 99))
    assert banned(edited(sampling)) == {EOS, 8}
    assert banned(edited(sampling, output=(1,))) == {EOS, 8}
    assert banned(edited(sampling, output=(1, 1))) == set()


@settings(max_examples=examples(60), deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=10),
    output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=10),
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    presence=st.sampled_from([0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, 2.0, -0.3]),
)
def test_penalties_follow_their_definitions(
    prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    sampling = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={0: 0.25},
    )
    expected = plain().tolist()
    expected[0] += 0.25
    for token in {*prompt, *output}:
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    assert edited(sampling, prompt, output) == pytest.approx(expected, abs=1e-5)


def test_rows_are_edited_apart_from_each_other() -> None:
    entries = [
        entry(SamplingParams(allowed_token_ids=(1,))),
        entry(SamplingParams()),
        entry(SamplingParams(bad_words_token_ids=((9,),))),
        entry(SamplingParams(frequency_penalty=1.0), output=(4, 4)),
        entry(SamplingParams(repetition_penalty=2.0), prompt=(5, 6), output=(1,)),
    ]
    logits_RV = Batch(entries).apply()
    seen = plain()
    seen[[1, 5, 6]] = torch.tensor([-7.0, 0.25, 0.75])
    assert logits_RV[0].tolist() == seen.tolist()
    assert logits_RV[1].tolist() == [value - 2.0 * (token == 4) for token, value in enumerate(plain().tolist())]
    assert banned(logits_RV[2].tolist()) == {9}
    assert torch.equal(logits_RV[3], plain())
    assert banned(logits_RV[4].tolist()) == set(range(VOCAB_SIZE)) - {1}


def test_min_tokens_end_at_their_own_step() -> None:
    batch = Batch([entry(SamplingParams(min_tokens=2, max_tokens=9)), entry(SamplingParams(min_tokens=1))])
    assert [banned(row) for row in batch.apply().tolist()] == [{EOS}, {EOS}]
    batch.lens += 1
    assert [banned(row) for row in batch.apply().tolist()] == [set(), {EOS}]
    batch.lens += 1
    assert [banned(row) for row in batch.apply().tolist()] == [set(), set()]
