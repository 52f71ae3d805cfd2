"""Rows as padded batches: which attend together, and the shapes that kernels are compiled for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry
from pagefleet_engine.attention.padded_groups import group_rows, make_groups, rounded_up
from pagefleet_kernels.layout import KVLayout


def grouped(query_lens: list[int], context_lens: list[int]) -> list[list[int]]:
    return [g.tolist() for g in group_rows(np.array(query_lens), np.array(context_lens))]


def test_rows_of_one_shape_stay_together() -> None:
    assert len(grouped([1] * 64, [200] * 64)) == 1


def test_small_batches_are_not_worth_a_second_launch() -> None:
    assert len(grouped([1, 1, 1], [40, 90, 16])) == 1


def test_one_long_context_does_not_pad_the_others() -> None:
    groups = grouped([1] * 32, [4000] + [100] * 31)
    assert [0] in groups
    assert len(groups) == 2


def test_a_long_prompt_is_computed_apart_from_decoding_rows() -> None:
    groups = grouped([512, 1, 1, 1, 1], [512, 300, 310, 290, 305])
    assert groups[0] == [0]
    assert sorted(groups[1]) == [1, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=80))
def test_every_row_is_in_exactly_one_group(lens: list[tuple[int, int]]) -> None:
    groups = grouped([new for new, _ in lens], [new + computed for new, computed in lens])
    assert sorted(row for group in groups for row in group) == list(range(len(lens)))


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
    groups = make_groups(LAYOUT, batch, tables, AttentionSpec(layer=0, scale=1.0), dtype)
    return [(block.first, block.end) for group in groups for block in group.blocks]


def test_decoding_rows_of_16_bits_share_widths() -> None:
    assert widths([1, 1], [270, 530], torch.float32) == [(0, 34 * 16)]
    assert widths([1, 1], [270, 530], torch.bfloat16) == [(0, 36 * 16)]


@pytest.mark.parametrize(("dtype", "ends"), [(torch.float32, [228, 300]), (torch.bfloat16, [256, 320])])
def test_blocks_of_a_long_prompt_end_at_few_columns(dtype: torch.dtype, ends: list[int]) -> None:
    assert widths([200], [300], dtype) == [(0, end) for end in ends]


def test_one_query_of_one_row_needs_no_rounding() -> None:
    assert widths([1], [530], torch.bfloat16) == [(0, 530)]
