"""Both ends count blocks of several groups alike, in whatever pieces they are computed."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kv.p2p.stream import BlockStream
from pagefleet_kv.port import BlockRun
from pagefleet_protocol.block_hash import BlockHash

from tests.example_counts import examples
from tests.fakes.byte_pages import SHAPE

windows = st.lists(st.one_of(st.none(), st.integers(1, 24)), min_size=1, max_size=3).map(tuple)


def run(group: int, first: int, last: int) -> BlockRun:
    """Blocks whose numbers say what they are."""
    indices = range(first, last)
    hashes = [BlockHash(bytes([index])) for index in indices]
    return BlockRun(first, [group * 100 + index for index in indices], hashes, group)


@settings(max_examples=examples(300))
@given(
    windows, st.integers(1, 60), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 14), st.booleans()
)
def test_pieces_make_one_stream_of_which_any_end_is_wanted(
    windows: tuple[int | None, ...], num_tokens: int, pieces: list[int], num_cached: int, chunked: bool
) -> None:
    shape = msgspec.structs.replace(SHAPE, windows=windows, chunked=chunked)
    stream = BlockStream(shape, num_tokens)
    groups = range(len(windows))
    computed, sent = 0, list[int]()
    for size in [*pieces, 15]:
        piece = stream.merged([run(group, computed, computed + size) for group in groups])
        computed += size
        if piece is not None:
            assert piece.first == len(sent)
            sent += piece.blocks
    assert len(sent) == sum(stream.num_blocks - shape.needed_from(group, stream.num_blocks) for group in groups)

    first = min(num_cached, stream.num_blocks)
    starts = [max(first, shape.needed_from(group, stream.num_blocks)) for group in groups]
    wanted = stream.merged([run(group, start, stream.num_blocks) for group, start in zip(groups, starts, strict=True)])
    assert wanted is None or list(wanted.blocks) == sent[wanted.first :]
    assert (wanted is None) == all(start == stream.num_blocks for start in starts)


def test_it_ends_before_what_is_missing() -> None:
    stream = BlockStream(msgspec.structs.replace(SHAPE, windows=(None, 9)), 25)
    assert stream.merged([run(0, 0, 6), run(1, 4, 6)]) == BlockRun(
        0, (0, 1, 2, 3, 4, 104, 5, 105), tuple(BlockHash(bytes([index])) for index in (0, 1, 2, 3, 4, 4, 5, 5))
    )
    cut = stream.merged([run(0, 0, 6), run(1, 5, 6)])
    assert cut is not None
    assert cut.blocks == (0, 1, 2, 3, 4)


def test_a_single_group_travels_by_its_indices() -> None:
    assert BlockStream(SHAPE, 25).merged([run(0, 2, 8)]) == BlockRun(
        2, (2, 3, 4, 5), tuple(BlockHash(bytes([index])) for index in (2, 3, 4, 5))
    )
