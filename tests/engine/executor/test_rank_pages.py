"""Blocks of the whole model over the pools of ranks that each hold a part, and copies kept apart from steps."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.rank_pages import MappedPool, RankPages, StepFence, kv_shards, wait_for_steps
from pagefleet_engine.models.arch import LatentArch
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_kv.port import KVShard

from tests.fakes.architectures import llama_arch

NUM_BLOCKS = 6
HEAD_BYTES = 4
IDLE = StepFence(lambda _: None, 1)


Part = tuple[KVShard, MappedPool]


def mapped(content: NDArray[np.uint8], shard: KVShard) -> MappedPool:
    """A pool that another process has made, with this content."""
    memory = os.memfd_create("pool")
    pool = MappedPool(len(content), content[0].size, shard, memory)
    os.close(memory)
    pool.blocks[:] = content.reshape(pool.blocks.shape)
    return pool


def pools_of(layers: int, kv_heads: int, tensor: int, stages: int, blocks: NDArray[np.uint8]) -> list[Part]:
    """Pools of ranks that hold their parts of `blocks`: [num_blocks, layers, 2, heads, bytes]."""
    arch = llama_arch(num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=kv_heads)
    parallel = Parallelism(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    pools = []
    for shard in kv_shards(arch, parallel, group_layers([None] * layers)):
        part = blocks[:, shard.layers.start : shard.layers.stop, :, shard.heads.start : shard.heads.stop]
        pools.append((shard, mapped(part, shard)))
    return pools


def labelled(layers: int, kv_heads: int) -> NDArray[np.uint8]:
    """A pool of one rank, in which hardly any two bytes are alike."""
    shape = (NUM_BLOCKS, layers, 2, kv_heads, HEAD_BYTES)
    return np.random.default_rng(layers * kv_heads).integers(1, 256, shape, np.uint8)


@given(
    layers=st.integers(3, 7),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    stages=st.integers(1, 3),
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True),
)
def test_blocks_are_those_of_one_rank(layers: int, kv_heads: int, tensor: int, stages: int, blocks: list[int]) -> None:
    whole = labelled(layers, kv_heads)
    pages = RankPages(pools_of(layers, kv_heads, tensor, stages, whole), IDLE)
    assert pages.bytes_per_block == whole[0].size
    read = bytearray(len(blocks) * pages.bytes_per_block)
    assert pages.read(blocks, memoryview(read)).done()
    assert bytes(read) == whole[blocks].tobytes()

    empty = pools_of(layers, kv_heads, tensor, stages, np.zeros_like(whole))
    RankPages(empty, IDLE).write(memoryview(bytes(read)), blocks).wait()
    wanted = np.zeros_like(whole)
    wanted[blocks] = whole[blocks]
    expected = pools_of(layers, kv_heads, tensor, stages, wanted)
    for (_, pool), (_, wanted_pool) in zip(empty, expected, strict=True):
        assert (pool.blocks == wanted_pool.blocks).all()


def test_stages_of_a_model_with_windows_have_their_own_places_in_a_block() -> None:
    groups = group_layers([None, 5, 5, None, 5, 5])
    arch = llama_arch(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
    assert [group.layers for group in groups.groups] == [(0, 3), (1, 2), (4, 5)]
    alone = kv_shards(arch, Parallelism(tensor_parallel_size=2), groups)
    assert [(shard.layers, shard.heads) for shard in alone] == [(range(2), range(1)), (range(2), range(1, 2))]
    stages = kv_shards(arch, Parallelism(pipeline_parallel_size=2), groups)
    assert [shard.layers for shard in stages] == [range(2), range(2, 4)]  # at most two of one group in each


def test_latents_are_those_of_any_tensor_rank() -> None:
    """Two stages of two ranks that have the same latents: a whole block has them once."""
    whole = np.random.default_rng(1).integers(1, 256, (NUM_BLOCKS, 3, 1, 1, HEAD_BYTES), np.uint8)
    latent = LatentArch(rank=24, query_rank=None, nope_dim=8, rope_dim=8, value_dim=8, interleaved=True)
    arch = replace(llama_arch(num_hidden_layers=3, num_attention_heads=16), latent=latent)
    parallel = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2)

    def pools(content: NDArray[np.uint8]) -> list[Part]:
        shards = kv_shards(arch, parallel, group_layers([None] * 3))
        return [(shard, mapped(content[:, shard.layers.start : shard.layers.stop], shard)) for shard in shards]

    pages = RankPages(pools(whole), IDLE)
    assert pages.bytes_per_block == whole[0].size
    read = bytearray(2 * pages.bytes_per_block)
    pages.read([4, 1], memoryview(read))
    assert bytes(read) == whole[[4, 1]].tobytes()
    empty = pools(np.zeros_like(whole))
    RankPages(empty, IDLE).write(memoryview(bytes(read)), [4, 1])
    wanted = np.zeros_like(whole)
    wanted[[4, 1]] = whole[[4, 1]]
    for (_, pool), (_, expected) in zip(empty, pools(wanted), strict=True):
        assert (pool.blocks == expected.blocks).all()


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --tensor-parallel-size 1, 2, 4"):
        pools_of(3, 4, 3, 1, labelled(3, 4))


def test_a_read_waits_until_all_ranks_are_done_with_the_steps_that_were_taken() -> None:
    finished = chain([3, 3, 4], repeat(9))
    fence = StepFence(partial(wait_for_steps, lambda: next(finished), lambda: False), 2)
    fence.num_launched, fence.num_taken = 5, 4
    fence.before_read()
    assert next(finished) == 9


@pytest.mark.parametrize(
    ("max_in_flight", "launched", "taken", "awaited"),
    [(1, 8, 8, 8), (1, 9, 8, 8), (2, 9, 8, 9), (2, 8, 8, 8), (3, 9, 8, 9), (3, 11, 8, 10)],
)
def test_a_write_waits_for_steps_that_may_still_touch_its_blocks(
    max_in_flight: int, launched: int, taken: int, awaited: int
) -> None:
    finished = chain(range(4, awaited + 1), repeat(99))
    fence = StepFence(partial(wait_for_steps, lambda: next(finished), lambda: False), max_in_flight)
    fence.num_launched, fence.num_taken = launched, taken
    fence.before_write()
    assert next(finished) == 99


def test_nobody_waits_for_ranks_that_are_gone() -> None:
    gone = chain([False, False], repeat(True))
    fence = StepFence(partial(wait_for_steps, lambda: 0, lambda: next(gone)), 1)
    fence.num_launched = fence.num_taken = 1
    with pytest.raises(OSError, match="the engine's ranks are gone"):
        fence.before_write()
