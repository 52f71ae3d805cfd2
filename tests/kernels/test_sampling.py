"""Sampling kernels against their twins, which the tests of the twins hold to the definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels import sampling_truncation
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.reference_sampling import row_maxima
from pagefleet_kernels.sampling import sample_tokens
from pagefleet_kernels.sampling_noise import row_keys, spread_token_ids, subtract_log_exponential_
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import NOT_NUMBERS, NOTHING_LEFT, RowParameters, SamplingRows, VocabularyPart
from torch import Tensor

from tests.example_counts import examples

GREEDY = (0.0, 0, 1.0, 0.0)
PLAIN = (1.0, 0, 1.0, 0.0)
MIXED = [GREEDY, PLAIN, (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 12, 0.6, 0.01), (1.0, 0, 1.0, 0.1)]
"""(temperature, top-k, top-p, min-p)."""


def make_rows(
    parameters: Sequence[tuple[float, int, float, float]],
    device: torch.device,
    seeds: Sequence[int] | None = None,
    prompt_len: int = 3,
) -> SamplingRows:
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*parameters, strict=True))
    return SamplingRows(
        RowParameters(
            seed=np.array(seeds or range(len(parameters)), dtype=np.uint64),
            prompt_len=np.full(len(parameters), prompt_len),
            temperature=np.array(temperature, dtype=np.float64),
            top_k=np.array(top_k, dtype=np.int64),
            top_p=np.array(top_p, dtype=np.float64),
            log_min_p=np.array([math.log(p) if p > 0 else -math.inf for p in min_p], dtype=np.float32),
        ),
        device,
    )


def draw(logits_RV: Tensor, rows: SamplingRows, lens: Sequence[int], backend: Backend) -> tuple[list[int], Tensor]:
    """Tokens, and the slots' tokens afterwards; the twin runs on the host."""
    device = torch.device("cpu") if backend == "torch" else logits_RV.device
    tokens_SL = torch.zeros((len(lens) + 1, 32), dtype=torch.int32, device=device)
    slots_R = torch.arange(len(lens), 0, -1, device=device)
    lens_R = torch.tensor(lens, dtype=torch.int32, device=device)
    logits_RV = logits_RV.to(device, copy=backend == "torch")
    token_R = sample_tokens(logits_RV, rows, lens_R, TokenRecord(tokens_SL, slots_R), backend=backend)
    return token_R.tolist(), tokens_SL.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 128, 300])
def test_every_kind_of_row_draws_what_its_twin_draws(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide_RV = (torch.randn(len(MIXED), vocab_size + 9, generator=generator) * 3).to(dtype).to(device)
    logits_RV = wide_RV[:, 2 : vocab_size + 2]
    lens = [3, 4, 9, 31, 32, 5]
    tokens, recorded = draw(logits_RV, make_rows(MIXED, device), lens, "triton")
    expected, expected_record = draw(logits_RV, make_rows(MIXED, torch.device("cpu")), lens, "torch")
    assert tokens == expected
    assert torch.equal(recorded, expected_record)
    for row, length in enumerate(lens):
        if length < 32:  # a full slot has no place for another token
            assert recorded[len(lens) - row, length] == tokens[row]
            recorded[len(lens) - row, length] = 0
    assert not recorded.any()


def test_noise_of_the_kernel_is_that_of_the_twin_at_every_position(device: torch.device) -> None:
    """Flat logits: the token drawn is where the noise is largest, and tells of it alone."""
    seeds = [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1]
    logits_RV = torch.zeros(len(seeds), 1_000, device=device)
    for position in (0, 20):
        lens = [3 + position] * len(seeds)
        tokens, _ = draw(logits_RV, make_rows([PLAIN] * 6, device, seeds), lens, "triton")
        assert tokens == draw(logits_RV, make_rows([PLAIN] * 6, torch.device("cpu"), seeds), lens, "torch")[0]
        assert len(set(tokens)) > 3


def test_draws_of_the_kernel_follow_the_distribution(device: torch.device) -> None:
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1])
    count = 100
    logits_RV = weights.log().to(device).expand(count, -1)
    rows = make_rows([PLAIN] * count, device, seeds=range(1, count + 1))
    tokens, _ = draw(logits_RV, rows, [4] * count, "triton")
    found = torch.tensor(tokens).bincount(minlength=4)
    chi_square = float(((found - count * weights) ** 2 / (count * weights)).sum())
    assert chi_square < 16.3  # the 0.999 quantile for 3 degrees of freedom


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_first_of_equal_maxima_wins(backend: Backend, device: torch.device) -> None:
    logits_RV = torch.zeros(3, 300, device=device)
    logits_RV[1, [130, 299]] = 2.0
    logits_RV[2, [127, 128]] = 2.0
    where = device if backend == "triton" else torch.device("cpu")
    assert draw(logits_RV, make_rows([GREEDY] * 3, where), [3] * 3, backend)[0] == [0, 130, 127]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("parameters", [GREEDY, PLAIN, (1.0, 4, 0.9, 0.0)])
def test_unusable_rows_are_named_and_not_recorded(
    backend: Backend, parameters: tuple[float, int, float, float], device: torch.device
) -> None:
    logits_RV = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).to(device)
    logits_RV[0, 190] = math.nan
    logits_RV[1, 3] = math.inf
    logits_RV[2] = -math.inf
    logits_RV[3, 1:] = -math.inf
    where = device if backend == "triton" else torch.device("cpu")
    tokens, recorded = draw(logits_RV, make_rows([parameters] * 5, where), [8] * 5, backend)
    assert tokens[:4] == [NOT_NUMBERS, NOT_NUMBERS, NOTHING_LEFT, 0]
    assert tokens[4] >= 0
    assert recorded.nonzero().tolist() == [[1, 8]]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_counts_take_the_token_of_their_row(backend: Backend, device: torch.device) -> None:
    where = device if backend == "triton" else torch.device("cpu")
    logits_RV = torch.zeros(3, 150, device=where)
    logits_RV[0, 7] = logits_RV[1, 140] = 1.0
    logits_RV[2] = math.nan
    counts_PV = torch.ones((2, 150), dtype=torch.int32, device=where)
    record = TokenRecord(
        torch.zeros((3, 8), dtype=torch.int32, device=where),
        torch.arange(3, device=where),
        counts_PV,
        torch.tensor([-1, 1, 0], device=where),
    )
    lens_R = torch.full((3,), 4, dtype=torch.int32, device=where)
    sample_tokens(logits_RV, make_rows([GREEDY] * 3, where), lens_R, record, backend=backend)
    assert (counts_PV != 1).nonzero().tolist() == [[1, 140]]
    assert counts_PV[1, 140] == 3


def test_rows_that_take_turns_draw_as_those_that_do_not(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = (torch.randn(4, 140, generator=torch.Generator().manual_seed(2)) * 2).to(device)
    rows = make_rows([MIXED[2], GREEDY, MIXED[3], MIXED[4]], device)
    whole = draw(logits_RV, rows, [5] * 4, "triton")
    monkeypatch.setattr(sampling_truncation, "MAX_COLLECTED", 3 * 140)
    turns = draw(logits_RV, rows, [5] * 4, "triton")
    assert whole[0] == turns[0]
    assert torch.equal(whole[1], turns[1])


def kept_tokens(scores: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: the rule as written, by a sort, one row, ties kept."""
    wide = scores.double().numpy()
    kept = np.ones(len(wide), dtype=bool)
    if min_p > 0:
        kept &= wide - wide.max() >= np.float32(math.log(min_p))
    if top_k > 0:
        kept &= wide >= np.sort(wide)[-min(top_k, len(wide))]
    if top_p < 1:
        weights = np.where(kept, np.exp(wide - wide.max()), 0.0)
        order = np.argsort(-wide, kind="stable")
        running = np.cumsum(weights[order])
        # the sums of the kernel are float32
        last = int(np.searchsorted(running, top_p * running[-1] * (1 - 1e-6)))
        kept &= wide >= wide[order[min(last, len(wide) - 1)]]
    return set(np.flatnonzero(kept).tolist())


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(
    top_k=st.sampled_from([0, 2, 7, 50, 149, 400]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    scale=st.sampled_from([0.0, 0.3, 4.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_draws_only_and_all_of_what_a_sort_keeps(
    top_k: int, top_p: float, min_p: float, scale: float, seed: int
) -> None:
    """The token that must win is known: of those kept, the one whose score and noise are the largest."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores_V = (torch.randn(150, generator=torch.Generator().manual_seed(seed)) * scale).round(decimals=1)
    scores_V -= scores_V.max()
    kept = list(kept_tokens(scores_V, top_k, top_p, min_p))
    noisy_RV = torch.full((1, 150), -math.inf)
    noisy_RV[0, kept] = scores_V[kept]
    keys_R2 = row_keys(np.array([seed], dtype=np.uint64), np.array([6]))
    subtract_log_exponential_(noisy_RV, spread_token_ids(torch.arange(150)), torch.from_numpy(keys_R2))
    rows = make_rows([(1.0, top_k, top_p, min_p)], device, seeds=[seed])
    assert draw(scores_V.unsqueeze(0).to(device), rows, [9], "triton")[0] == noisy_RV.argmax(1).tolist()


def test_a_row_draws_alike_alone_and_among_others(device: torch.device) -> None:
    logits_RV = (torch.randn(len(MIXED), 260, generator=torch.Generator().manual_seed(3)) * 2).to(device)
    together, _ = draw(logits_RV, make_rows(MIXED, device, seeds=range(7, 13)), [6] * 6, "triton")
    order = [4, 1, 3]
    part = make_rows([MIXED[row] for row in order], device, seeds=[7 + row for row in order])
    assert draw(logits_RV[order], part, [6] * 3, "triton")[0] == [together[row] for row in order]


@pytest.mark.parametrize("at", [0, 127, 128, 255, 256, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf, 50.0])
def test_row_maxima_find_what_stands_anywhere(at: int, value: float) -> None:
    x_RV = torch.zeros(2, 300)
    x_RV[1, at] = value
    best_R, at_R = row_maxima(x_RV)
    assert best_R[0] == 0.0
    assert best_R[1].isnan() if math.isnan(value) else best_R[1] == value
    assert at_R[1] == at


def test_misfits_are_refused(device: torch.device) -> None:
    lens_R, rows = torch.ones(2, dtype=torch.int32, device=device), make_rows([GREEDY] * 2, device)
    record = TokenRecord(torch.zeros((2, 4), dtype=torch.int32, device=device), torch.arange(2, device=device))
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        sample_tokens(torch.zeros(3, 2, device=device).T, rows, lens_R, record)
    with pytest.raises(UnsupportedShapeError, match="3 rows of logits"):
        sample_tokens(torch.zeros(3, 2, device=device), rows, lens_R, record)


def draw_divided(
    logits_RV: Tensor, widths: Sequence[int], rows: SamplingRows, lens: Sequence[int], backend: Backend
) -> list[list[int]]:
    """What each rank samples. They run one after another, again and again, until each has been given what all others
    send: a round more for each time that they send."""
    sent: dict[tuple[int, int], Tensor] = {}
    device = torch.device("cpu") if backend == "torch" else logits_RV.device
    for _ in range(4):
        tokens = []
        for rank, own_RW in enumerate(logits_RV.to(device).split_with_sizes(list(widths), 1)):
            calls = iter(range(4))

            def gather(x: Tensor, sizes: Sequence[int], rank: int = rank, calls: Iterator[int] = calls) -> Tensor:
                assert len(sizes) == len(widths)
                assert x.shape[-1] == sizes[rank]
                call = next(calls)
                sent[call, rank] = x.clone()
                others = (sent.get((call, other)) for other in range(len(widths)))
                given = [
                    x.new_zeros((*x.shape[:-1], n)) if y is None else y for y, n in zip(others, sizes, strict=True)
                ]
                return torch.cat(given, -1)

            record = TokenRecord(
                torch.zeros((len(lens), 32), dtype=torch.int32, device=device), torch.arange(len(lens), device=device)
            )
            lens_R = torch.tensor(lens, dtype=torch.int32, device=device)
            part = VocabularyPart(tuple(widths), rank, gather)
            tokens.append(sample_tokens(own_RW.clone(), rows, lens_R, record, part=part, backend=backend).tolist())
            assert [record.tokens_SL[row, length].item() for row, length in enumerate(lens)] == [
                max(0, token) for token in tokens[-1]
            ]
    return tokens


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("widths", [(150, 150), (129, 1, 170), (64, 64, 64, 64)])
def test_ranks_with_parts_of_the_logits_draw_what_one_draws(
    widths: tuple[int, ...], backend: Backend, device: torch.device
) -> None:
    kinds = [GREEDY, PLAIN, (0.3, 0, 1.0, 0.0), GREEDY, GREEDY, PLAIN, PLAIN]
    generator = torch.Generator().manual_seed(len(widths))
    logits_RV = torch.randn(len(kinds), sum(widths), generator=generator) * 3
    logits_RV[3, :] = 1.0  # the first of equals wins
    logits_RV[4, -1] = logits_RV[5, 0] = math.nan
    logits_RV[6, :] = -math.inf
    logits_RV, lens = logits_RV.to(device), [3, 4, 5, 6, 7, 8, 9]
    where = torch.device("cpu") if backend == "torch" else device
    expected, _ = draw(logits_RV, make_rows(kinds, where), lens, backend)
    assert expected[3:] == [0, NOT_NUMBERS, NOT_NUMBERS, NOTHING_LEFT]
    assert draw_divided(logits_RV, widths, make_rows(kinds, where), lens, backend) == [expected] * len(widths)
    assert draw_divided(logits_RV[:1], widths, make_rows(kinds[:1], where), lens[:1], backend) == [expected[:1]] * len(
        widths
    )


def test_truncated_rows_need_all_logits(device: torch.device) -> None:
    part = VocabularyPart((2, 2), 0, lambda x, _: x)
    with pytest.raises(UnsupportedShapeError, match="top-k, top-p and min-p need the logits of all tokens"):
        sample_tokens(
            torch.zeros(1, 2, device=device),
            make_rows([(1.0, 2, 1.0, 0.0)], device),
            torch.tensor([3], dtype=torch.int32, device=device),
            TokenRecord(torch.zeros((1, 8), dtype=torch.int32, device=device), torch.tensor([0], device=device)),
            part=part,
        )
