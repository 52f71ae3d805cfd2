"""Grouping rows by shape: every row once, like with like, few groups."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.attention.grouping import group_rows


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
