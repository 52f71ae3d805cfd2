"""Plans between workers that split a model differently, carried out on labelled bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pagefleet_kv.shard_plan import Shard, ShardError, plan_pulls, split_shards, tensor_shards

HEAD_BYTES = 6
Labels = NDArray[np.int64]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, list[Shard], list[Shard]]:
    num_layers = draw(st.integers(2, 7))
    num_heads = draw(st.sampled_from([1, 2, 4, 8]))
    sides = []
    for _ in range(2):
        tensor = draw(st.sampled_from([1, 2, 4, 8, 16]))
        pipeline = draw(st.integers(1, min(3, num_layers)))
        sides.append(split_shards(num_layers, num_heads, tensor, pipeline))
    return num_layers, num_heads, sides[0], sides[1]


def whole_block(num_layers: int, num_heads: int) -> Labels:
    """A block of the whole model, every byte with its own number: [layers, 2, heads, bytes]."""
    shape = (num_layers, 2, num_heads, HEAD_BYTES)
    return np.arange(np.prod(shape)).reshape(shape)


def block_of(whole: Labels, shard: Shard) -> Labels:
    part = whole[shard.first_layer : shard.end_layer, :, shard.first_head : shard.end_head]
    return np.ascontiguousarray(part).reshape(-1)


@given(splits())
def test_every_byte_of_the_target_is_written_once_and_right(split: tuple[int, int, list[Shard], list[Shard]]) -> None:
    num_layers, num_heads, sources, targets = split
    whole = whole_block(num_layers, num_heads)
    held = [block_of(whole, shard) for shard in sources]
    for rank, target in enumerate(targets):
        wanted = block_of(whole, target)
        got = np.full_like(wanted, -1)
        for pull in plan_pulls(sources, target, rank, HEAD_BYTES):
            for copy in pull.copies:
                source = held[pull.source_rank][copy.source : copy.source + copy.num_bytes]
                assert len(source) == copy.num_bytes, "read beyond the block"
                place = got[copy.target : copy.target + copy.num_bytes]
                assert (place == -1).all(), "written twice"
                got[copy.target : copy.target + copy.num_bytes] = source
        assert (got == wanted).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_splits_move_whole_blocks(size: int) -> None:
    shards = tensor_shards(4, 4, size)
    for rank, shard in enumerate(shards):
        (pull,) = plan_pulls(shards, shard, rank, HEAD_BYTES)
        assert pull.source_rank == rank
        assert [copy.num_bytes for copy in pull.copies] == [4 * 2 * shard.num_heads * HEAD_BYTES]


def test_a_wider_target_takes_a_slice_of_each_layer() -> None:
    (pull,) = plan_pulls(tensor_shards(3, 4, 1), tensor_shards(3, 4, 2)[1], 1, HEAD_BYTES)
    assert [(copy.source, copy.target) for copy in pull.copies[:3]] == [(12, 0), (36, 12), (60, 24)]
    assert len(pull.copies) == 3 * 2


def test_a_narrower_target_takes_from_all() -> None:
    pulls = plan_pulls(tensor_shards(3, 4, 4), tensor_shards(3, 4, 1)[0], 0, HEAD_BYTES)
    assert [pull.source_rank for pull in pulls] == [0, 1, 2, 3]


def test_replicas_share_the_sending() -> None:
    sources, targets = tensor_shards(2, 1, 4), tensor_shards(2, 1, 8)
    sent = Counter(plan_pulls(sources, target, rank, HEAD_BYTES)[0].source_rank for rank, target in enumerate(targets))
    assert sent == {0: 2, 1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize(("heads", "workers"), [(3, 2), (4, 3), (8, 12)])
def test_heads_that_do_not_divide_are_refused(heads: int, workers: int) -> None:
    with pytest.raises(ShardError, match=f"{heads} K/V heads cannot be split over {workers} workers"):
        tensor_shards(2, heads, workers)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ShardError, match="too few"):
        split_shards(2, 1, 1, 3)
    with pytest.raises(ShardError, match="at least one"):
        split_shards(0, 1, 1, 1)


def test_a_source_that_lacks_a_layer_is_refused() -> None:
    with pytest.raises(ShardError, match="no worker of the source holds"):
        plan_pulls(split_shards(4, 2, 1, 2)[:1], Shard(0, 4, 0, 2), 0, HEAD_BYTES)
