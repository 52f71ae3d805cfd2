"""Which rank sends what to which, whatever the numbers of ranks, stages and heads on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.p2p.planes.device.lanes import ShardsDiffer, plan_lanes, region_of, whole_of
from pagefleet_kv.port import KVShard

LAYERS, HEADS, HEAD_BYTES = 6, 4, 2


def shards(stages: int, tensor: int) -> list[KVShard]:
    """Of as many ranks; where heads are fewer, several hold the same."""
    layers = [range(at * LAYERS // stages, (at + 1) * LAYERS // stages) for at in range(stages)]
    per_rank = max(1, HEADS // tensor)
    starts = [rank * HEADS // tensor // per_rank * per_rank for rank in range(tensor)]
    return [KVShard(held, range(start, start + per_rank)) for held in layers for start in starts]


SIDES = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 8]))


@given(SIDES, SIDES)
def test_every_rank_gets_each_of_its_bytes_once(source_ranks: tuple[int, int], target_ranks: tuple[int, int]) -> None:
    sources, targets = shards(*source_ranks), shards(*target_ranks)
    block = np.arange(LAYERS * 2 * HEADS * HEAD_BYTES).reshape(LAYERS, 2, HEADS * HEAD_BYTES)

    def held(shard: KVShard) -> np.ndarray:
        heads = shard.heads
        return block[shard.layers.start : shard.layers.stop, :, heads.start * HEAD_BYTES : heads.stop * HEAD_BYTES]

    for number, target in enumerate(targets):
        got = np.full(held(target).shape, -1)
        for lane in [lane for lane in plan_lanes(sources, targets) if lane.target == number]:
            there, here = (region_of(lane.shard, one, HEAD_BYTES) for one in (sources[lane.source], target))
            assert there.num_bytes == here.num_bytes
            part = got[slice(*here.layers), :, slice(*here.bytes)]
            assert (part == -1).all(), "it came twice"
            part[:] = held(sources[lane.source])[slice(*there.layers), :, slice(*there.bytes)]
        assert (got == held(target)).all()


def test_ranks_that_hold_the_same_take_turns() -> None:
    assert [(lane.source, lane.target) for lane in plan_lanes(shards(1, 8), shards(1, 4))] == [
        (0, 0),
        (3, 1),
        (4, 2),
        (7, 3),
    ]


def test_a_side_that_lacks_something_is_refused() -> None:
    with pytest.raises(ShardsDiffer, match="its ranks do not hold what rank 1 does"):
        plan_lanes(shards(1, 2)[:1], shards(1, 2))
    with pytest.raises(ShardsDiffer):
        plan_lanes([KVShard(range(LAYERS), range(HEADS), 1)], shards(1, 1))
    with pytest.raises(ShardsDiffer):
        plan_lanes([], shards(1, 1))


def test_all_ranks_hold_the_model() -> None:
    assert whole_of(shards(3, 4)) == KVShard(range(LAYERS), range(HEADS))
