"""What a store has of a prompt is the longest prefix of which every group has what later tokens see."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kv.store.prefix import longest_prefix

from tests.example_counts import examples
from tests.fakes.byte_pages import SHAPE

LIMIT = 9
windows = st.lists(st.one_of(st.none(), st.integers(1, 24)), min_size=1, max_size=3).map(tuple)
stored = st.sets(st.tuples(st.integers(0, 2), st.integers(0, LIMIT - 1)))


@settings(max_examples=examples(500))
@given(
    windows,
    stored,
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, LIMIT - 1)), max_size=3),
    st.integers(0, 4),
    st.booleans(),
)
def test_it_is_the_longest_that_is_whole(
    windows: tuple[int | None, ...],
    stored: set[tuple[int, int]],
    missing: set[tuple[int, int]],
    first: int,
    chunked: bool,
) -> None:
    for blocks in (stored, {(group, index) for group in range(3) for index in range(LIMIT)} - missing):
        shape = msgspec.structs.replace(SHAPE, windows=windows, chunked=chunked)
        whole = [
            length
            for length in range(first + 1, LIMIT + 1)
            if all(
                (group, index) in blocks
                for group in range(len(windows))
                for index in range(max(first, shape.needed_from(group, length)), length)
            )
        ]
        found = longest_prefix(shape, first, LIMIT, lambda *place: place in blocks)  # noqa: B023
        assert found == max(whole, default=first)
