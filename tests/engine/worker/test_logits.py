"""Every edit of the logits against its definition, alone and together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.step import NewRow
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_engine.worker.logits import LogitEdits, RowEdits
from pagefleet_engine.worker.token_counts import TokenCounts
from torch import Tensor

VOCAB_SIZE = 12
EOS = 3


def entry(sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> NewRow:
    return NewRow("r", (*prompt, *output), len(prompt), sampling, (EOS,))


def edited(sampling: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> list[float]:
    """Logits 0.5, 1.5, ... after the edits of a request with this output, fed token by token."""
    row = RowEdits(entry(sampling, prompt), VOCAB_SIZE)
    edits = LogitEdits([(1, row)], VOCAB_SIZE, torch.device("cpu"))
    for token in output:
        row.append(token)
    logits_SV = plain().repeat(3, 1)
    edits.apply_(logits_SV)
    assert torch.equal(logits_SV[0], plain())
    assert torch.equal(logits_SV[2], plain())
    values: list[float] = logits_SV[1].tolist()
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


@settings(max_examples=60, deadline=None)
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


def test_after_a_preemption_the_output_is_known_from_the_start() -> None:
    sampling = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        min_tokens=4,
        bad_words_token_ids=((6, 7),),
    )
    grown = RowEdits(entry(sampling, (1, 2)), VOCAB_SIZE)
    for token in (5, 5, 6):
        grown.append(token)
    back = RowEdits(entry(sampling, (1, 2), (5, 5, 6)), VOCAB_SIZE)
    results = []
    for row in (grown, back):
        logits_SV = plain().unsqueeze(0).clone()
        LogitEdits([(0, row)], VOCAB_SIZE, torch.device("cpu")).apply_(logits_SV)
        results.append(logits_SV)
    assert torch.equal(*results)
    assert banned(results[0][0].tolist()) == {EOS, 7}


def test_rows_are_edited_apart_from_each_other() -> None:
    rows = [
        RowEdits(entry(SamplingParams(allowed_token_ids=(1,))), VOCAB_SIZE),
        RowEdits(entry(SamplingParams(frequency_penalty=1.0), output=(4, 4)), VOCAB_SIZE),
        RowEdits(entry(SamplingParams(bad_words_token_ids=((9,),))), VOCAB_SIZE),
    ]
    logits_SV = plain().repeat(4, 1)
    LogitEdits([(3, rows[0]), (0, rows[1]), (2, rows[2])], VOCAB_SIZE, torch.device("cpu")).apply_(logits_SV)
    assert logits_SV[0].tolist() == [value - 2.0 * (token == 4) for token, value in enumerate(plain().tolist())]
    assert torch.equal(logits_SV[1], plain())
    assert banned(logits_SV[2].tolist()) == {9}
    assert banned(logits_SV[3].tolist()) == set(range(VOCAB_SIZE)) - {1}


def test_counts_grow_past_their_first_capacity() -> None:
    counts = TokenCounts([5, 5, 6])
    for token in range(200):
        counts.append(token)
        counts.append(token)
    found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert found == dict.fromkeys(range(200), 2)


def test_prompt_tokens_are_seen_but_not_counted() -> None:
    counts = TokenCounts([5, 5, 6])
    counts.append(6)
    assert counts.token_ids.tolist() == [5, 6]
    assert counts.output_counts.tolist() == [0, 1]
