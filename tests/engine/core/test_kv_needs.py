"""What a request needs: the arithmetic against counting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.kv_groups import (
    UNBOUNDED_TOKENS,
    blocks_for_request,
    group_layers,
    longest_request,
    most_window_blocks,
)
from pagefleet_protocol.kv_blob import first_needed_block

from tests.example_counts import examples

layer_windows = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 9))
def test_a_chunk_with_its_window_touches_at_most_so_many_blocks_and_somewhere_does(
    window: int, chunk: int, block_size: int
) -> None:
    touched = []
    for computed in range(window, window + block_size):
        first = first_needed_block(computed, window, block_size)
        assert first == max(0, computed - window + 1) // block_size
        touched.append((computed + chunk - 1) // block_size - first + 1)
    assert max(touched) == most_window_blocks(window, chunk, block_size)
    assert most_window_blocks(window, chunk, block_size) <= -(-(window - 1 + chunk) // block_size) + 1


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 9))
def test_a_token_sees_the_blocks_of_its_own_chunk_of_the_context(computed: int, size: int, block_size: int) -> None:
    """By counting; a window of as many tokens sees all of them, so what is reckoned for it is enough."""
    of_chunk = [position for position in range(computed + 1) if position // size == computed // size]
    first = first_needed_block(computed, size, block_size, chunked=True)
    assert first == of_chunk[0] // block_size
    assert first >= first_needed_block(computed, size, block_size)


def test_full_groups_need_every_block_and_windows_their_most() -> None:
    groups = group_layers([None, 32, 32, 32])
    assert len(groups) == 4
    assert blocks_for_request(groups, 16, 16, chunk=64) == 4
    assert blocks_for_request(groups, 1600, 16, chunk=64) == 100 + 3 * 7
    assert blocks_for_request(groups, 1600, 16, chunk=1) == 100 + 3 * 3


@settings(max_examples=examples(200), deadline=None)
@given(layer_windows, st.integers(0, 80), st.integers(1, 8), st.integers(1, 30))
def test_the_longest_request_fits_and_one_block_more_does_not(
    windows: list[int | None], num_blocks: int, block_size: int, chunk: int
) -> None:
    groups = group_layers(windows)
    longest = longest_request(groups, num_blocks, block_size, chunk)
    if longest == UNBOUNDED_TOKENS:
        assert None not in windows
        assert blocks_for_request(groups, 10**6, block_size, chunk) <= num_blocks
    else:
        assert longest % block_size == 0
        assert blocks_for_request(groups, longest, block_size, chunk) <= num_blocks
        assert blocks_for_request(groups, longest + 1, block_size, chunk) > num_blocks


def test_without_windows_the_pool_is_the_limit() -> None:
    assert longest_request(group_layers([None] * 4), 100, 16, chunk=8192) == 1600


@pytest.mark.parametrize(("num_blocks", "longest"), [(5, 80), (6, UNBOUNDED_TOKENS)])
def test_where_all_layers_have_a_window_a_pool_that_holds_it_holds_any_length(num_blocks: int, longest: int) -> None:
    assert most_window_blocks(65, 8, 16) == 6
    assert longest_request(group_layers([65] * 4), num_blocks, 16, chunk=8) == longest
