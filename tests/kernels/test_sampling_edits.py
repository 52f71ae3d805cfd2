"""Edits of logits by kernel and by twin, each against its definition written as a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.sampling_edits import (
    BadWords,
    History,
    ListedTokens,
    Penalties,
    ban_bad_words_,
    edit_listed,
    penalise_,
)
from torch import Tensor

from tests.example_counts import examples

BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])


def ids(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_listed_ids_are_biased_and_restricted_rows_keep_no_other(
    backend: Backend, dtype: torch.dtype, device: torch.device
) -> None:
    vocab_size = 40
    logits_RV = torch.randn(3, vocab_size + 8, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    logits_RV = logits_RV[:, 4:-4]
    plain_RV = logits_RV.float().clone()
    index_N = ids(3, 39, 2 * vocab_size + 5, 2 * vocab_size + 6, 2 * vocab_size, device=device)
    bias_N = torch.tensor([1.5, -math.inf, 0.0, -2.0, -math.inf], device=device)
    out_RV = edit_listed(logits_RV, ListedTokens(index_N, bias_N, ids(2, device=device)), backend=backend)
    expected_RV = plain_RV.clone()
    expected_RV[2] = -math.inf
    expected_RV[0, 3] += 1.5
    expected_RV[0, 39] = -math.inf
    expected_RV[2, 5] = plain_RV[2, 5]
    expected_RV[2, 6] = plain_RV[2, 6] - 2.0
    assert out_RV.is_contiguous()
    torch.testing.assert_close(out_RV, expected_RV, rtol=0.0, atol=0.0)


@BACKENDS
def test_a_restriction_to_nothing_leaves_nothing(backend: Backend, device: torch.device) -> None:
    listed = ListedTokens(ids(device=device), torch.empty(0, device=device), ids(1, device=device))
    out_RV = edit_listed(torch.zeros(2, 9, device=device), listed, backend=backend)
    assert out_RV.tolist() == [[0.0] * 9, [-math.inf] * 9]


@BACKENDS
def test_begun_words_ban_their_last_token(backend: Backend, device: torch.device) -> None:
    tokens_SL = torch.zeros((3, 10), dtype=torch.int32)
    tokens_SL[2, :6] = torch.tensor([9, 9, 5, 6, 5, 7])  # row 0: output 5 6 5 7
    tokens_SL[0, :4] = torch.tensor([9, 9, 5, 7])  # row 1: prompt 9 9 5, output 7
    history = History(
        tokens_SL.to(device), ids(2, 0, device=device), torch.tensor([6, 4], dtype=torch.int32, device=device)
    )
    words = torch.tensor(
        [[1, 7, 5, -1], [2, 7, 6, 5], [3, 7, -1, -1], [4, 5, -1, -1], [1, 7, 5, -1], [3, 7, -1, -1], [3, 8, -1, -1]],
        dtype=torch.int32,
        device=device,
    )
    bad = BadWords(words, ids(0, 0, 0, 0, 1, 1, 1, device=device), ids(2, 2, 2, 2, 3, 3, 3, device=device))
    logits_RV = torch.zeros(2, 12, device=device)
    ban_bad_words_(logits_RV, bad, history, backend=backend)
    assert logits_RV.isinf().nonzero().tolist() == [[0, 1], [0, 3], [1, 3]]


@BACKENDS
def test_a_word_longer_than_the_output_is_not_begun(backend: Backend, device: torch.device) -> None:
    tokens_SL = torch.full((1, 4), 5, dtype=torch.int32, device=device)
    history = History(tokens_SL, ids(0, device=device), torch.tensor([1], dtype=torch.int32, device=device))
    words = torch.tensor([[1, 5, 5]], dtype=torch.int32, device=device)
    bad = BadWords(words, ids(0, device=device), ids(0, device=device))
    logits_RV = torch.zeros(1, 6, device=device)
    ban_bad_words_(logits_RV, bad, history, backend=backend)
    assert not logits_RV.any()


@BACKENDS
@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(
    lists=st.lists(
        st.tuples(st.lists(st.integers(0, 29), min_size=1, max_size=6), st.lists(st.integers(0, 29), max_size=8)),
        min_size=1,
        max_size=2,
    ),
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    presence=st.sampled_from([0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, 2.0]),
)
def test_penalties_follow_their_definitions(
    backend: Backend,
    lists: list[tuple[list[int], list[int]]],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and backend == "triton" else "cpu")
    vocab_size, num_rows = 30, len(lists)
    tokens_SL = torch.full((num_rows, 16), 29, dtype=torch.int32)
    counts_PV = torch.zeros((num_rows, vocab_size), dtype=torch.int32)
    logits_RV = torch.randn(num_rows + 1, vocab_size, generator=torch.Generator().manual_seed(5))
    expected_RV = logits_RV.clone()
    first, lens = [], [1]
    for row, (prompt, output) in enumerate(lists):
        known = prompt + output
        tokens_SL[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        lens.append(len(known))
        first.append(0 if repetition != 1.0 else len(prompt))
        seen = {*prompt, *output} if repetition != 1.0 else set(output)
        for token in seen:
            in_prompt = token in prompt and repetition != 1.0
            counts_PV[row, token] = 2 * output.count(token) + in_prompt
            x = float(expected_RV[row + 1, token])
            scaled = x / repetition if x > 0 else x * repetition
            expected_RV[row + 1, token] = scaled - presence * (token in output) - frequency * output.count(token)
    penalties = Penalties(
        row_E=torch.arange(1, num_rows + 1, device=device),
        count_row_E=torch.arange(num_rows, device=device),
        first_E=ids(*first, device=device),
        weights_3E=torch.tensor([[repetition], [presence], [frequency]], device=device).repeat(1, num_rows),
    )
    slots_R = ids(0, *range(num_rows), device=device)
    history = History(tokens_SL.to(device), slots_R, torch.tensor(lens, dtype=torch.int32, device=device))
    most = max(length - start for length, start in zip(lens[1:], first, strict=True))
    edited_RV = logits_RV.clone().to(device)
    penalise_(edited_RV, penalties, counts_PV.to(device), history, most, backend=backend)
    torch.testing.assert_close(edited_RV.cpu(), expected_RV, rtol=1e-5, atol=1e-5)
