"""The compiled draw against its twin, token for token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.sampling import sample_natively
from pagefleet_kernels.sampling import sample_tokens
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import NOT_NUMBERS, NOTHING_LEFT
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries
from tests.kernels.test_sampling import GREEDY, MIXED, PLAIN, make_rows

SETS = {library.instruction_set: library for library in native_libraries()}
CPU = torch.device("cpu")
Parameters = tuple[float, int, float, float]

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(scope="module", params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


def both(library: Library, logits_RV: Tensor, parameters: list[Parameters], lens: list[int]) -> list[list[int]]:
    """Tokens of the kernel and of the twin, which must leave the same record."""
    rows, lens_R = make_rows(parameters, CPU), torch.tensor(lens, dtype=torch.int32)
    found, records = [], []
    before = logits_RV.clone()
    for native in (True, False):
        slots_R = torch.arange(len(lens), 0, -1)
        counts_PV = torch.zeros((len(lens), logits_RV.shape[1]), dtype=torch.int32)
        record = TokenRecord(torch.zeros((len(lens) + 1, 40), dtype=torch.int32), slots_R, counts_PV, slots_R - 1)
        if native:
            token_R = sample_natively(library, logits_RV, rows, lens_R, record)
            assert torch.equal(logits_RV.nan_to_num(), before.nan_to_num())
        else:
            token_R = sample_tokens(logits_RV.clone(), rows, lens_R, record, backend="torch")
        found.append(token_R.tolist())
        records.append(torch.cat((record.tokens_SL.flatten(), counts_PV.flatten())))
    assert torch.equal(*records)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 63, 64, 65, 300, 1_000, 5_000]),
    rows=st.lists(
        st.one_of(
            st.sampled_from(MIXED),
            st.tuples(
                st.sampled_from([0.1, 0.8, 1.5, 50.0]),
                st.sampled_from([0, 1, 4, 63, 64, 200, 3_000]),
                st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
                st.sampled_from([0.0, 0.001, 0.2, 1.0]),
            ),
        ),
        min_size=1,
        max_size=8,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    banned=st.sampled_from([0.0, 0.5, 0.98]),
    seed=st.integers(0, 2**20),
)
def test_tokens_are_those_of_the_twin(
    library: Library,
    vocab: int,
    rows: list[Parameters],
    dtype: torch.dtype,
    spread: float,
    banned: float,
    seed: int,
) -> None:
    """Ties too: logits of bfloat16 have many."""
    generator = torch.Generator().manual_seed(seed)
    wide_RV = torch.randn(len(rows), vocab + 9, generator=generator) * spread
    wide_RV[torch.rand(wide_RV.shape, generator=generator) < banned] = -math.inf
    lens = [3 + (seed + row) % 30 for row in range(len(rows))]
    tokens, expected = both(library, wide_RV.to(dtype)[:, 2 : vocab + 2], rows, lens)
    assert tokens == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_a_vocabulary_of_a_real_model(library: Library, threads: int) -> None:
    generator = torch.Generator().manual_seed(threads)
    parameters: list[Parameters] = [
        GREEDY, PLAIN, (0.7, 50, 0.9, 0.0), (1.0, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05), (3.0, 0, 0.9, 0.0),
        (1.0, 2_500, 0.99, 0.0), (2.0, 0, 1.0, 0.0),
    ]  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for position in range(6):
            logits_RV = torch.randn(8, 151_936, generator=generator) * 3
            tokens, expected = both(library, logits_RV, parameters, [3 + position] * 8)
            assert tokens == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("parameters", [GREEDY, PLAIN, (1.0, 4, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.5)])
def test_unusable_rows_are_named(library: Library, parameters: Parameters) -> None:
    logits_RV = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    logits_RV[0, 190] = math.nan
    logits_RV[1, 3] = math.inf
    logits_RV[2] = -math.inf
    logits_RV[3, 1:] = -math.inf
    tokens, expected = both(library, logits_RV, [parameters] * 5, [8] * 5)
    assert tokens == expected
    assert tokens[:4] == [NOT_NUMBERS, NOT_NUMBERS, NOTHING_LEFT, 0]


def test_the_first_of_equal_maxima_wins(library: Library) -> None:
    logits_RV = torch.zeros(3, 300)
    logits_RV[1, [130, 299]] = 2.0
    logits_RV[2, [127, 128]] = 2.0
    assert both(library, logits_RV, [GREEDY] * 3, [3] * 3)[0] == [0, 130, 127]


def test_other_shapes_are_refused(library: Library) -> None:
    record = TokenRecord(torch.zeros((2, 8), dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    lens_R = torch.zeros(1, dtype=torch.int32)
    for logits_RV in (torch.zeros(2, 7), torch.zeros(7, 2).t()[:1]):
        with pytest.raises(UnsupportedShapeError, match="contiguous rows"):
            sample_natively(library, logits_RV, make_rows([GREEDY], CPU), lens_R, record)
