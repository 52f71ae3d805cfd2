"""How many lengths attention meets on the CPU: few in the types whose kernels are compiled for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.attention.backend import BatchGeometry
from pagefleet_engine.attention.padded_groups import make_groups, rounded_up
from pagefleet_kernels.layout import KVLayout

LAYOUT = KVLayout(num_blocks=64, num_layers=1, num_kv_heads=1, block_size=16, head_dim=8)


@given(st.integers(1, 100_000))
def test_lengths_grow_by_an_eighth_at_most(count: int) -> None:
    assert count <= rounded_up(count) <= count * 9 / 8
    assert rounded_up(rounded_up(count)) == rounded_up(count)


def test_short_lengths_stay_and_long_ones_are_few() -> None:
    assert [rounded_up(count) for count in range(1, 17)] == list(range(1, 17))
    assert len({rounded_up(count) for count in range(1, 4097)}) == 16 + 8 * 8


def widths(query_lens: list[int], seq_lens: list[int], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the columns of each product of a step."""
    starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
    tables = np.zeros((len(seq_lens), 64), dtype=np.int32)
    slots = torch.zeros(sum(query_lens), dtype=torch.int64)
    batch = BatchGeometry(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        (torch.from_numpy(tables),),
        (slots,),
        max(query_lens),
        query_lens,
        seq_lens,
    )
    groups = make_groups(LAYOUT, batch, tables, None, dtype)
    return [(block.first, block.end) for group in groups for block in group.blocks]


def test_decoding_rows_of_16_bits_share_widths() -> None:
    assert widths([1, 1], [270, 530], torch.float32) == [(0, 34 * 16)]
    assert widths([1, 1], [270, 530], torch.bfloat16) == [(0, 36 * 16)]


@pytest.mark.parametrize(("dtype", "ends"), [(torch.float32, [228, 300]), (torch.bfloat16, [256, 320])])
def test_blocks_of_a_long_prompt_end_at_few_columns(dtype: torch.dtype, ends: list[int]) -> None:
    assert widths([200], [300], dtype) == [(0, end) for end in ends]


def test_one_query_of_one_row_needs_no_rounding() -> None:
    assert widths([1], [530], torch.bfloat16) == [(0, 530)]
