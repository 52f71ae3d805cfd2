"""Which part of a layer is a rank's own: ranges of the rows or columns of the checkpoint's tensors.

Ranks take consecutive ranges, as equal as whole units allow; a unit is a head, or a block of a quantized matrix:

width 88, units of 16, 4 ranks   |----------32|----------32|----16|--8|
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.group import RankGroup

# Products of narrower pieces are slower, packed or not.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """What is kept of one dimension of a stored tensor."""

    whole: int
    """Size of that dimension."""
    ranges: tuple[range, ...]
    """Kept side by side in this order; none is empty."""

    @property
    def size(self) -> int:
        """How much is kept."""
        return sum(map(len, self.ranges))

    @property
    def is_part(self) -> bool:
        """Whether other ranks have the rest."""
        return self.size < self.whole

    @property
    def is_all(self) -> bool:
        """Whether everything is kept, in the order in which it is stored."""
        return self.ranges == (range(self.whole),)

    def times(self, size: int) -> Shard:
        """The same of units of `size`."""
        return Shard(self.whole * size, tuple(range(r.start * size, r.stop * size) for r in self.ranges))

    def in_blocks_of(self, size: int) -> Shard:
        """The blocks that these ranges consist of; the last one of the whole may be shorter.

        Raises:
            ValueError: a range begins or ends inside a block.
        """
        if any(r.start % size or (r.stop % size and r.stop != self.whole) for r in self.ranges):
            raise ValueError(f"{self} is not made of blocks of {size}")
        return Shard(-(-self.whole // size), tuple(range(r.start // size, -(-r.stop // size)) for r in self.ranges))


def shard_of(size: int | Shard) -> Shard:
    """All of a dimension, unless told otherwise."""
    return size if isinstance(size, Shard) else Shard(size, (range(size),))


def stacked(shards: Iterable[Shard]) -> Shard:
    """Of a stored tensor that holds several, one after another."""
    ranges: list[range] = []
    whole = 0
    for shard in shards:
        ranges += [range(whole + own.start, whole + own.stop) for own in shard.ranges]
        whole += shard.whole
    return Shard(whole, _joined(ranges))


def in_groups(heads: Shard, kv_heads: Shard, head_dim: int) -> Shard:
    """Of a stored tensor where each key head, and then its value head, follows the query heads that read it: these
    query heads, these keys, these values.

    3 groups of 2:   |q0 q1 k0 v0|q2 q3 k1 v1|q4 q5 k2 v2|
    """
    each = heads.whole // kv_heads.whole
    queries = [number // each * 2 + number for own in heads.ranges for number in own]
    keys = [number * (each + 2) + each for own in kv_heads.ranges for number in own]
    order = (*queries, *keys, *(number + 1 for number in keys))
    ranges = _joined(range(place * head_dim, (place + 1) * head_dim) for place in order)
    return Shard((heads.whole + 2 * kv_heads.whole) * head_dim, ranges)


def _joined(ranges: Iterable[range]) -> tuple[range, ...]:
    """The same with neighbours as one."""
    joined: list[range] = []
    for each in ranges:
        start = joined.pop().start if joined and joined[-1].stop == each.start else each.start
        joined.append(range(start, each.stop))
    return tuple(joined)


def shares(size: int, ranks: int, what: str, unit: int = 1) -> tuple[range, ...]:
    """Each rank's range of a width, which begins and ends with whole units; the first ranks take what is over.

    Raises:
        ConfigError: there are not enough units for each rank to have one; `what` names the width.
    """
    if unit == 1 and size % ranks and size >= _ALIGNMENT * ranks:
        unit = _ALIGNMENT
    units = -(-size // unit)
    if units < ranks:
        blocks = f" in blocks of {unit}" if unit > 1 else ""
        raise ConfigError(
            f"{what} of {size}{blocks} cannot be divided among {ranks} ranks: give --tensor-parallel-size {units} at "
            "most"
        )
    most, over = divmod(units, ranks)
    ends = [min(size, unit * (most * rank + min(rank, over))) for rank in range(ranks + 1)]
    return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def own_share(size: int, ranks: RankGroup, what: str, unit: int = 1) -> Shard:
    """This rank's of `shares`."""
    return Shard(size, (shares(size, ranks.size, what, unit)[ranks.index],))


def own_heads(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> tuple[Shard, Shard]:
    """A rank's query heads, and the key/value heads that they read: where there are fewer of these than ranks, several
    ranks have the same one.

    Raises:
        ConfigError: the heads do not divide.
    """

    def divides(ranks: int) -> bool:
        return not num_heads % ranks and not (num_kv_heads % ranks and ranks % num_kv_heads)

    if not divides(ranks):
        fitting = ", ".join(str(ranks) for ranks in range(1, num_heads + 1) if divides(ranks))
        raise ConfigError(
            f"{num_heads} heads of attention over {num_kv_heads} of keys and values cannot be divided among {ranks} "
            f"ranks: give --tensor-parallel-size {fitting}"
        )
    own, own_kv, first_kv = num_heads // ranks, max(1, num_kv_heads // ranks), rank * num_kv_heads // ranks
    return (
        Shard(num_heads, (range(own * rank, own * (rank + 1)),)),
        Shard(num_kv_heads, (range(first_kv, first_kv + own_kv),)),
    )
