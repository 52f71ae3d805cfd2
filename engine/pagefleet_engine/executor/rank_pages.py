"""The K/V that ranks hold, as whole blocks of the model, for connectors: what one rank alone would have.

What a connector reads or writes has the axes block, layer, key or value, head, token, dimension, over all layers of the
block's group and heads of the model; of latents, which every tensor rank has whole, block, layer, token, dimension. A
rank holds a range of the layers and one of the heads, so its part of a block is one range of bytes for each of its
layers' keys and values. Nothing outside an engine knows how many ranks it has: engines of different numbers pass each
other the same bytes.

Steps run in the ranks' processes, which are never quite as far as the core thinks. `StepFence` keeps copies right.
Ranks of another machine are asked over the network, by `nodes.far_pools`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pagefleet_kv.p2p.planes.device.opening import PlaneDevice
from pagefleet_kv.p2p.planes.device.turns import TurnGiver
from pagefleet_kv.port import KVShard, PagesCopy
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_engine.core.kv_groups import KVGroups, stage_slots
from pagefleet_engine.layers.shard import own_heads
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.worker.kv_pages import CopyDone, runs
from pagefleet_engine.worker.pool_memory import map_pool

LOOK_S = 0.0002
"""Between two looks at how far the ranks are."""

Bytes = NDArray[np.uint8]


class StepFence:
    """Keeps copies apart from the steps that touch the same blocks.

    Reads: a connector is offered blocks once the step that filled them was taken, which one rank tells. Others may be
    about to write yet, where no result of theirs went into that rank's.

    Writes: a block is given to a load between two steps, by the thread that schedules. Before, it may have been of a
    request that ended, which steps that were launched by then may still write to: all but `max_in_flight - 1` of these
    had been taken. Steps that are launched later do not touch it before the load has ended. So it is enough to wait for
    those that have been taken by now, and as many more, if they were launched.

    The core's thread counts; any thread waits.

    Args:
        wait: waits until all ranks are done with so many steps; raises OSError where they are gone.
        max_in_flight: steps that are launched before the first of them is taken.
    """

    def __init__(self, wait: Callable[[int], None], max_in_flight: int) -> None:
        self.num_launched = 0
        self.num_taken = 0
        self._wait = wait
        self._max_in_flight = max_in_flight

    @property
    def steps_to_read(self) -> int:
        """A rank that is done with so many has offered blocks as they will stay."""
        return self.num_taken

    @property
    def steps_to_write(self) -> int:
        """A rank that is done with so many writes no more to blocks that were given to loads."""
        return min(self.num_launched, self.num_taken + self._max_in_flight - 1)

    def before_read(self) -> None:
        """Wait until blocks that were offered are as they will stay.

        Raises:
            OSError: the ranks are gone.
        """
        self._wait(self.steps_to_read)

    def before_write(self) -> None:
        """Wait until no step writes any more to blocks that were given to loads.

        Raises:
            OSError: the ranks are gone.
        """
        self._wait(self.steps_to_write)


def wait_for_steps(num_finished: Callable[[], int], is_over: Callable[[], bool], num_steps: int) -> None:
    """Wait until `num_finished` tells of so many steps.

    Raises:
        OSError: the ranks are gone, as `is_over` says.
    """
    while num_finished() < num_steps:
        if is_over():
            raise OSError("the engine's ranks are gone")
        time.sleep(LOOK_S)


def kv_shards(arch: ModelArch, parallel: Parallelism, groups: KVGroups) -> list[KVShard]:
    """Return what each rank of a model holds; where heads are fewer than ranks, several hold the same.

    Raises:
        ConfigError: the heads do not divide.
    """
    stages, size = stage_slots(groups, arch.stage_layers(parallel)), parallel.tensor_parallel_size
    shards = []
    for part in map(parallel.part, range(parallel.world_size)):
        (heads,) = own_heads(arch.num_heads, arch.kv.heads, part.tensor, size)[1].ranges
        shards.append(KVShard(stages[part.stage], heads, arch.kv.vectors))
    return shards


class RankPool(Protocol):
    """One rank's pool: blocks of `[layers, vectors, layer_bytes]`, of its own layers. Used by any thread."""

    @property
    def layer_bytes(self) -> int:
        """Of the keys, or the values, or the latents, of a block in one layer."""
        ...

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copy blocks to the host; returns once that is done.

        Raises:
            OSError: the rank is gone, or cannot.
        """
        ...

    def write(self, source: Bytes, blocks: Sequence[int]) -> None:
        """Fill blocks from the host; returns once that is done.

        Raises:
            OSError: the rank is gone, or cannot.
        """
        ...


class MappedPool:
    """Implements `RankPool` over memory that this process maps too.

    Args:
        num_blocks: of the pool.
        bytes_per_block: of the rank's part.
        shard: what the rank holds.
        descriptor: of the memory, in which the rank has made its pool.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int, shard: KVShard, descriptor: int) -> None:
        layers = len(shard.layers)
        self.layer_bytes = bytes_per_block // layers // shard.vectors
        """See RankPool."""
        memory = map_pool(num_blocks * bytes_per_block, descriptor)
        flat = np.frombuffer(memory, np.uint8, num_blocks * bytes_per_block)
        self.blocks = flat.reshape(num_blocks, layers, shard.vectors, self.layer_bytes)
        """The pool itself."""

    def read(self, blocks: Sequence[int], into: Bytes) -> None:
        """See RankPool."""
        for place, first, count in runs(blocks):
            into[place : place + count] = self.blocks[first : first + count]

    def write(self, source: Bytes, blocks: Sequence[int]) -> None:
        """See RankPool."""
        for place, first, count in runs(blocks):
            self.blocks[first : first + count] = source[place : place + count]


class RankPages:
    """Implements `KVPages` and `RankedPool` over the pools of all ranks.

    Args:
        pools: each with what its rank holds.
        fence: keeps copies apart from steps.
        devices: of all ranks, where planes may be opened there; else none.
        turns: see RankedPool.
    """

    host = None
    """See KVPages: no range of memory is a whole block."""
    wants_pinned = False
    """See KVPages."""

    def __init__(
        self,
        pools: Sequence[tuple[KVShard, RankPool]],
        fence: StepFence,
        devices: Sequence[PlaneDevice] = (),
        turns: Callable[[PlaneName], TurnGiver] | None = None,
    ) -> None:
        self._fence = fence
        self._turns = turns
        self.devices = devices
        """See RankedPool."""
        self._targets = pools
        first_of = {(shard.layers.start, shard.heads.start): (shard, pool) for shard, pool in reversed(pools)}
        self._sources = list(first_of.values())
        """Who is read: each layer and head once."""
        shard, pool = pools[0]
        self._head_bytes = pool.layer_bytes // len(shard.heads)
        num_layers = max(shard.layers.stop for shard, _ in pools)
        num_heads = max(shard.heads.stop for shard, _ in pools)
        self._shape = (num_layers, shard.vectors, num_heads * self._head_bytes)
        self.bytes_per_block = prod(self._shape)
        """See KVPages: over all layers and heads of the model."""

    def turns(self, plane: PlaneName) -> TurnGiver:
        """See RankedPool."""
        assert self._turns is not None, "turns without devices"
        return self._turns(plane)

    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        """See KVPages."""
        host = self._as_blocks(into, len(blocks))
        self._fence.before_read()
        for shard, pool in self._sources:
            pool.read(blocks, self._part(host, shard))
        return CopyDone()

    def write(self, source: memoryview, blocks: Sequence[int]) -> PagesCopy:
        """See KVPages."""
        host = self._as_blocks(source, len(blocks))
        self._fence.before_write()
        for shard, pool in self._targets:
            pool.write(self._part(host, shard), blocks)
        return CopyDone()

    def _as_blocks(self, host: memoryview, count: int) -> Bytes:
        return np.frombuffer(host, np.uint8).reshape(count, *self._shape)

    def _part(self, host: Bytes, shard: KVShard) -> Bytes:
        """What a rank holds of whole blocks."""
        layers, heads, size = shard.layers, shard.heads, self._head_bytes
        return host[:, layers.start : layers.stop, :, heads.start * size : heads.stop * size]
