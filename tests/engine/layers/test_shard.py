"""Each rank's part: together the whole, in whole units; and what is said where that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.shard import Shard, in_groups, own_heads, shard_of, shares, stacked


@given(size=st.integers(1, 5000), ranks=st.integers(1, 16), unit=st.sampled_from([1, 2, 16, 128]))
def test_shares_are_whole_units_and_together_the_whole(size: int, ranks: int, unit: int) -> None:
    if -(-size // unit) < ranks:
        with pytest.raises(ConfigError, match=f"give --tensor-parallel-size {-(-size // unit)} at most$"):
            shares(size, ranks, "an MLP", unit)
        return
    parts = shares(size, ranks, "an MLP", unit)
    assert [number for part in parts for number in part] == list(range(size))
    assert all(parts)
    assert all(part.start % unit == 0 for part in parts)
    longest = max(map(len, parts[:-1]), default=0)
    assert longest - min(map(len, parts[:-1]), default=0) <= max(unit, 16)


def test_widths_that_divide_are_divided_evenly() -> None:
    assert list(map(len, shares(11008, 4, "an MLP"))) == [2752] * 4
    assert list(map(len, shares(88, 4, "an MLP", 16))) == [32, 32, 16, 8]


@given(
    ranks=st.integers(1, 12),
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
)
def test_a_rank_has_the_keys_that_its_queries_read(ranks: int, kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        with pytest.raises(ConfigError, match="cannot be divided among"):
            own_heads(heads, kv_heads, 0, ranks)
        return
    queries: list[int] = []
    for rank in range(ranks):
        (own,), (own_kv,) = (shard.ranges for shard in own_heads(heads, kv_heads, rank, ranks))
        queries += own
        for place, head in enumerate(own):
            assert own_kv[place * len(own_kv) // len(own)] == head // group
    assert queries == list(range(heads))


def test_heads_that_do_not_divide_name_the_numbers_that_do() -> None:
    with pytest.raises(ConfigError) as error:
        own_heads(12, 4, 0, 5)
    assert str(error.value) == (
        "12 heads of attention over 4 of keys and values cannot be divided among 5 ranks: give --tensor-parallel-size "
        "1, 2, 4, 12"
    )


def test_parts_of_one_stored_tensor_lie_one_after_another() -> None:
    parts = (Shard(8, (range(2, 4),)), Shard(4, (range(1, 2),)))
    assert stacked(parts) == Shard(12, (range(2, 4), range(9, 10)))
    assert stacked((shard_of(8), shard_of(4))) == shard_of(12)


def test_blocks_of_a_part() -> None:
    assert Shard(40, (range(16, 40),)).in_blocks_of(16) == Shard(3, (range(1, 3),))
    for inside in (range(8, 32), range(16, 36)):
        with pytest.raises(ValueError, match="is not made of blocks"):
            Shard(40, (inside,)).in_blocks_of(16)


@given(
    kv_heads=st.integers(1, 6), group=st.integers(1, 5), ranks=st.integers(1, 4), head_dim=st.sampled_from([1, 2, 8])
)
def test_heads_in_groups_are_a_ranks_queries_keys_and_values(
    kv_heads: int, group: int, ranks: int, head_dim: int
) -> None:
    heads = kv_heads * group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return
    stored = [
        (kind, number, place)
        for kv in range(kv_heads)
        for kind, number in (*(("q", kv * group + each) for each in range(group)), ("k", kv), ("v", kv))
        for place in range(head_dim)
    ]
    for rank in range(ranks):
        own, own_kv = own_heads(heads, kv_heads, rank, ranks)
        shard = in_groups(own, own_kv, head_dim)
        assert shard.whole == len(stored)
        kept = [stored[place] for own_range in shard.ranges for place in own_range]
        order = [("q", own), ("k", own_kv), ("v", own_kv)]
        assert kept == [
            (kind, number, place)
            for kind, of in order
            for own_range in of.ranges
            for number in own_range
            for place in range(head_dim)
        ]
