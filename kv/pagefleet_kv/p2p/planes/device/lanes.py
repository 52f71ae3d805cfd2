"""Who of one engine's ranks sends what to whom of another's: a plan of sizes alone, made alike on both sides.

A rank holds some layers and heads of each block, so what two ranks have in common is a range of each. A lane is such a
pair: it carries every block's range from the source's pool to the target's. Each target gets each of its layers and
heads once; where several sources hold the same, targets take turns among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pagefleet_kv.port import KVShard


class ShardsDiffer(Exception):
    """The ranks of two engines do not hold the same blocks."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank of the source, one of the target, and what goes from one to the other."""

    source: int
    target: int
    shard: KVShard
    """In the model's numbers."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A part of each block of a rank's pool."""

    axes: tuple[int, int, int]
    """Of a whole block there: layers, vectors, bytes of a layer's vectors."""
    layers: tuple[int, int]
    """First, and the one after the last."""
    bytes: tuple[int, int]
    """The same, of each layer's vectors."""

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return (self.layers[1] - self.layers[0]) * self.axes[1] * (self.bytes[1] - self.bytes[0])


class LaneTerms(msgspec.Struct, frozen=True, array_like=True):
    """How a rank has its end of a lane."""

    region: Region | None = None
    """Of its blocks, which the lane carries; None: all of them."""
    in_turn: bool = False
    """Whether transfers whose kernels wait for the other rank's are launched when the engine says so."""


WHOLE = LaneTerms()
"""Between engines of one rank."""


def plan_lanes(sources: Sequence[KVShard], targets: Sequence[KVShard]) -> list[Lane]:
    """Return the lanes between two engines, by source and target.

    Raises:
        ShardsDiffer: there is a target of which the sources do not hold all.
    """
    lanes = []
    for number, target in enumerate(targets):
        mine = []
        for shard in dict.fromkeys(sources):
            common = KVShard(_common(shard.layers, target.layers), _common(shard.heads, target.heads), shard.vectors)
            if common.layers and common.heads:
                holders = [source for source, held in enumerate(sources) if held == shard]
                mine.append(Lane(holders[number % len(holders)], number, common))
        if sum(map(_area, mine)) != len(target.layers) * len(target.heads) or {target.vectors} != {
            lane.shard.vectors for lane in mine
        }:
            raise ShardsDiffer(f"its ranks do not hold what rank {number} does")
        lanes += mine
    return sorted(lanes, key=lambda lane: (lane.source, lane.target))


def region_of(part: KVShard, rank: KVShard, head_bytes: int) -> Region:
    """Return where a part of what a rank holds lies in its blocks."""

    def within(inner: range, outer: range, size: int) -> tuple[int, int]:
        return (inner.start - outer.start) * size, (inner.stop - outer.start) * size

    axes = len(rank.layers), rank.vectors, len(rank.heads) * head_bytes
    return Region(axes, within(part.layers, rank.layers, 1), within(part.heads, rank.heads, head_bytes))


def whole_of(shards: Sequence[KVShard]) -> KVShard:
    """Return what all ranks hold together, which is the model's blocks."""
    layers, heads = (range(max(part.stop for part in parts)) for parts in zip(*_axes(shards), strict=True))
    return KVShard(layers, heads, shards[0].vectors)


def num_parts(shard: KVShard) -> int:
    """Return how many pieces of one head's bytes a block of it has."""
    return math.prod((len(shard.layers), shard.vectors, len(shard.heads)))


def _axes(shards: Sequence[KVShard]) -> list[tuple[range, range]]:
    return [(shard.layers, shard.heads) for shard in shards]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _area(lane: Lane) -> int:
    return len(lane.shard.layers) * len(lane.shard.heads)
