"""Block tables in tokens: admission by prefix, growth, publication only of what is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.kv_cache import Grant, KVCache
from pagefleet_engine.core.request import Request
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams


def make_request(
    name: str, tokens: Sequence[int], scope: PrefixScope | None = None, prompt_logprobs: int | None = None
) -> Request:
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Request(name, tokens, sampling, (0,), scope or PrefixScope("model"))


def admit(cache: KVCache, request: Request, spare_blocks: int = 0) -> Grant:
    grant = cache.admit(request, spare_blocks)
    assert grant is not None
    request.num_computed_tokens = grant.num_cached_tokens
    return grant


def compute(cache: KVCache, request: Request, num_tokens: int | None = None) -> None:
    """Advance to `num_tokens` (default: all) and publish."""
    request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
    cache.publish_computed(request, request.num_computed_tokens)


def test_admission_takes_blocks_for_all_known_tokens() -> None:
    cache = KVCache(8, 4)
    grant = admit(cache, make_request("a", range(9)))
    assert len(grant.blocks[0]) == 3
    assert grant.num_cached_tokens == 0
    assert cache.num_free_blocks == 5
    assert cache.usage == 3 / 8


def test_admission_leaves_the_spare_blocks_or_changes_nothing() -> None:
    cache = KVCache(4, 4)
    request = make_request("a", range(9))
    assert cache.admit(request, spare_blocks=2) is None
    assert cache.num_free_blocks == 4
    cache.check_integrity([])
    assert cache.admit(request, spare_blocks=1) is not None


def test_a_common_prefix_is_shared_block_by_block() -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(12))
    first_grant = admit(cache, first)
    compute(cache, first)
    grant = admit(cache, make_request("b", [*range(8), 99, 99, 99]))
    assert grant.num_cached_tokens == 8
    assert grant.blocks[0][:2] == first_grant.blocks[0][:2]
    assert grant.blocks[0][2] not in first_grant.blocks[0]


def test_a_full_hit_computes_the_last_block_again_in_a_block_of_its_own() -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(8))
    first_grant = admit(cache, first)
    compute(cache, first)
    grant = admit(cache, make_request("b", range(8)))
    assert grant.num_cached_tokens == 4
    assert grant.blocks[0][1] not in first_grant.blocks[0]


def test_a_prompt_one_longer_than_its_cached_blocks_uses_them_all() -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(8))
    admit(cache, first)
    compute(cache, first)
    assert admit(cache, make_request("b", range(9))).num_cached_tokens == 8


def test_only_computed_full_blocks_are_found() -> None:
    cache = KVCache(32, 4)
    first = make_request("a", range(16))
    admit(cache, first)
    for num_computed, num_found in ((3, 0), (4, 4), (7, 4), (8, 8), (15, 12)):
        compute(cache, first, num_computed)
        probe = make_request("b", range(16))
        assert admit(cache, probe).num_cached_tokens == num_found
        cache.free("b")


def test_sampled_tokens_are_found_by_a_follow_up_prompt() -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(3))
    admit(cache, first)
    for token in (50, 51, 52, 53, 54):
        compute(cache, first)
        first.token_ids.append(token)
        assert cache.grow(first, 1) is not None
    compute(cache, first)
    cache.free("a")
    assert admit(cache, make_request("b", [0, 1, 2, 50, 51, 52, 53, 54, 60])).num_cached_tokens == 8


@pytest.mark.parametrize(
    "scope", [PrefixScope("other"), PrefixScope("model", adapter="x"), PrefixScope("model", salt="x")]
)
def test_nothing_is_shared_between_scopes(scope: PrefixScope) -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(12))
    admit(cache, first)
    compute(cache, first)
    assert admit(cache, make_request("b", range(12), scope)).num_cached_tokens == 0


def test_prompt_logprobs_need_every_position_computed() -> None:
    cache = KVCache(16, 4)
    first = make_request("a", range(12), prompt_logprobs=0)
    admit(cache, first)
    compute(cache, first)
    assert admit(cache, make_request("b", range(12), prompt_logprobs=0)).num_cached_tokens == 0
    assert admit(cache, make_request("c", range(12))).num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = KVCache(16, 4, enable_prefix_caching=False)
    first = make_request("a", range(12))
    admit(cache, first)
    compute(cache, first)
    assert first.block_hashes == []
    assert admit(cache, make_request("b", range(12))).num_cached_tokens == 0


def test_free_cached_blocks_count_as_room_only_once() -> None:
    cache = KVCache(4, 4)
    first = make_request("a", range(12))
    admit(cache, first)
    compute(cache, first)
    cache.free("a")
    # Four free blocks, two of them the prefix: all four are needed, so one spare block is too much to ask.
    longer = make_request("b", [*range(8), *range(90, 98)])
    assert cache.admit(longer, spare_blocks=1) is None
    assert admit(cache, longer).num_cached_tokens == 8
    assert cache.num_free_blocks == 0
    cache.check_integrity([longer])


def test_growth_adds_a_block_at_each_boundary_and_stops_when_none_is_free() -> None:
    cache = KVCache(3, 4)
    request = make_request("a", range(4))
    table = list(admit(cache, request).blocks[0])
    assert cache.grow(request, 4) == ()
    for num_tokens, num_added in ((5, 1), (8, 0), (9, 1), (12, 0)):
        added = cache.grow(request, num_tokens)
        assert added is not None
        assert sum(map(len, added)) == num_added
        table += [block for group in added for block in group]
    assert sorted(table) == [0, 1, 2]
    assert cache.grow(request, 13) is None
    cache.check_integrity([request])


def test_freed_blocks_stay_findable_and_discarded_ones_do_not() -> None:
    cache = KVCache(16, 4)
    for name, base in (("kept", 0), ("dropped", 100)):
        request = make_request(name, range(base, base + 8))
        admit(cache, request)
        compute(cache, request)
    cache.free("kept")
    cache.discard(request)
    assert cache.num_free_blocks == 16
    assert admit(cache, make_request("a", range(9))).num_cached_tokens == 8
    assert admit(cache, make_request("b", range(100, 109))).num_cached_tokens == 0


def test_reset_forgets_what_nobody_holds() -> None:
    cache = KVCache(16, 4)
    request = make_request("a", range(8))
    admit(cache, request)
    compute(cache, request)
    assert cache.reset_prefix_cache() == 0
    cache.free("a")
    assert cache.reset_prefix_cache() == 2
    assert admit(cache, make_request("b", range(9))).num_cached_tokens == 0


def test_integrity_finds_a_table_without_its_request() -> None:
    cache = KVCache(4, 4)
    request = make_request("a", range(4))
    admit(cache, request)
    cache.check_integrity([request])
    with pytest.raises(IntegrityError, match="not the running ones"):
        cache.check_integrity([])


def test_integrity_finds_more_tokens_than_blocks() -> None:
    cache = KVCache(4, 4)
    request = make_request("a", range(4))
    admit(cache, request)
    request.num_computed_tokens = 5
    with pytest.raises(IntegrityError, match="a: 1 blocks"):
        cache.check_integrity([request])
