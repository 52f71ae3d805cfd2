"""Block tables where some layers have a window: what is held, promised, given back, and found again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.kv_cache import Grant, KVCache
from pagefleet_engine.core.kv_groups import blocks_for_request, group_layers, most_window_blocks
from pagefleet_engine.core.request import Request
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples

FULL_AND_WINDOW = (None, 8)
WINDOW = (8,)


def make_cache(
    num_blocks: int,
    windows: Sequence[int | None],
    chunk: int = 16,
    enable_prefix_caching: bool = True,
    chunked: bool = False,
) -> KVCache:
    return KVCache(num_blocks, 4, enable_prefix_caching, group_layers(windows, chunked=chunked), chunk)


def make_request(name: str, tokens: Sequence[int]) -> Request:
    return Request(name, tokens, SamplingParams(), (0,), PrefixScope("model"))


def admit(cache: KVCache, request: Request, max_new_tokens: int | None = None) -> Grant:
    grant = cache.admit(request, 0, max_new_tokens)
    assert grant is not None
    request.num_computed_tokens = grant.num_cached_tokens
    return grant


def schedule(cache: KVCache, request: Request, num_new: int) -> Sequence[Sequence[int]]:
    """As the scheduler: make room, and count the tokens as computed while the step is still to run."""
    added = cache.grow(request, num_new)
    assert added is not None
    request.num_computed_tokens += num_new
    return added


def compute_prompt(cache: KVCache, request: Request, chunk: int) -> None:
    """Admit and compute all known tokens, each chunk published before the next is scheduled."""
    admit(cache, request, chunk)
    while request.num_computed_tokens < request.num_tokens:
        schedule(cache, request, min(chunk, request.num_tokens - request.num_computed_tokens))
        cache.publish_computed(request, request.num_computed_tokens)


def num_held(cache: KVCache) -> int:
    return cache.num_blocks - cache.num_free_blocks


def test_a_long_prompt_holds_its_full_blocks_and_one_window() -> None:
    cache = make_cache(100, FULL_AND_WINDOW)
    request = make_request("a", range(160))
    grant = admit(cache, request, 16)
    assert list(map(len, grant.blocks)) == [40, 4]
    most = most_window_blocks(8, 16, 4)
    while request.num_computed_tokens < 160:
        schedule(cache, request, 16)
        assert 40 < num_held(cache) <= 40 + most
        cache.check_integrity([request])
    request.token_ids.append(7)
    schedule(cache, request, 1)
    assert num_held(cache) == 41 + most_window_blocks(8, 1, 4)


def test_the_first_token_after_a_chunk_gives_back_what_only_the_chunk_needed() -> None:
    cache = make_cache(100, WINDOW)
    request = make_request("a", range(46))
    compute_prompt(cache, request, 16)
    assert num_held(cache) == 6
    request.token_ids.append(7)
    schedule(cache, request, 1)
    assert num_held(cache) == 3


def test_decoding_in_a_window_takes_no_block_from_others() -> None:
    cache = make_cache(12, WINDOW)
    request = make_request("a", range(20))
    compute_prompt(cache, request, 16)
    for token in range(200):
        request.token_ids.append(token)
        schedule(cache, request, 1)
        cache.publish_computed(request, request.num_computed_tokens)
        assert num_held(cache) <= most_window_blocks(8, 1, 4) == 3
        cache.check_integrity([request])


def test_what_a_step_adds_comes_after_the_blocks_of_the_table() -> None:
    cache = make_cache(100, FULL_AND_WINDOW)
    request = make_request("a", range(40))
    grant = admit(cache, request, 16)
    schedule(cache, request, 16)
    assert cache.grow(request, 0) == ()
    added = schedule(cache, request, 16)
    assert list(map(len, added)) == [0, 4]
    assert not set(added[1]) & set(grant.blocks[1][2:])  # its last two are still in sight


def test_a_chunk_of_the_context_is_given_back_when_the_next_begins() -> None:
    """Chunks of 24 tokens, decoded token by token: six blocks and then one."""
    cache = make_cache(100, (24,), chunked=True)
    request = make_request("a", range(20))
    compute_prompt(cache, request, 16)
    held = []
    for token in range(60):
        request.token_ids.append(token)
        schedule(cache, request, 1)
        cache.publish_computed(request, request.num_computed_tokens)
        cache.check_integrity([request])
        held.append(num_held(cache))
    assert held == [(position % 24) // 4 + 1 for position in range(20, 80)]


def test_a_prefix_that_ends_with_a_chunk_needs_none_of_its_blocks() -> None:
    cache = make_cache(100, (None, 24), chunked=True)
    compute_prompt(cache, make_request("a", range(60)), 16)
    for length, found in ((48, 0), (56, 2), (44, 5)):
        grant = admit(cache, probe := make_request("b", [*range(length), 99]))
        assert grant.num_cached_tokens == length
        assert len([block for block in grant.blocks[1] if block]) - 1 == found
        cache.free(probe.request_id)


def test_an_admitted_prompt_never_runs_out_though_others_take_all_that_is_left() -> None:
    cache = make_cache(7 + 6, WINDOW)
    long = make_request("long", range(100))
    admit(cache, long, 4)
    assert num_held(cache) == 1
    assert cache.usage == pytest.approx(most_window_blocks(8, 16, 4) / 13)
    others: list[Request] = []
    while (grant := cache.admit(other := make_request(f"b{len(others)}", [len(others)] * 4), 0)) is not None:
        assert len(grant.blocks[0]) == 1
        others.append(other)
    assert len(others) == 13 - most_window_blocks(8, 16, 4)
    while long.num_computed_tokens < 100:
        schedule(cache, long, min(16, 100 - long.num_computed_tokens))
        cache.check_integrity([long, *others])


def test_a_newcomer_leaves_spare_blocks_for_each_group() -> None:
    cache = make_cache(10, FULL_AND_WINDOW)
    request = make_request("a", range(16))
    assert cache.admit(request, spare_blocks=2) is None
    cache.check_integrity([])
    assert cache.admit(request, spare_blocks=1) is not None


def test_growth_by_sampled_tokens_fails_when_all_is_held_or_promised() -> None:
    cache = make_cache(11, WINDOW)
    first = make_request("first", range(4))
    admit(cache, first)
    schedule(cache, first, 4)
    admit(cache, make_request("long", range(100)), 4)
    fillers = [make_request(f"f{number}", [number]) for number in range(11 - 1 - most_window_blocks(8, 16, 4))]
    for filler in fillers:
        admit(cache, filler)
    first.token_ids.append(9)
    assert cache.num_free_blocks > 0
    assert cache.grow(first, 1) is None
    cache.free("f0")
    assert cache.grow(first, 1) is not None


def test_a_shared_window_that_one_request_leaves_still_has_blocks_for_it() -> None:
    chunk, most = 4, most_window_blocks(8, 4, 4)
    cache = make_cache(2 * most, WINDOW, chunk)
    first = make_request("a", range(40))
    admit(cache, first)
    schedule(cache, first, 4)
    cache.publish_computed(first, 4)
    schedule(cache, first, 4)
    cache.publish_computed(first, 8)
    second = make_request("b", [*range(8), *range(100, 132)])
    assert admit(cache, second).num_cached_tokens == 8
    while first.num_computed_tokens < 40:
        for request in (first, second):
            if request.num_computed_tokens < 40:
                schedule(cache, request, 4)
            cache.check_integrity([first, second])


def test_a_prefix_is_found_by_the_last_window_alone_and_null_blocks_stand_before_it() -> None:
    cache = make_cache(100, FULL_AND_WINDOW)
    first = make_request("a", range(40))
    compute_prompt(cache, first, 16)
    second = make_request("b", [*range(40), 99])
    grant = admit(cache, second)
    assert grant.num_cached_tokens == 40
    assert grant.blocks[1][:8] == (0,) * 8
    assert len(grant.blocks[1]) == 11
    assert len(set(grant.blocks[0]) | set(grant.blocks[1][8:])) == 11 + 3
    cache.check_integrity([first, second])


def test_blocks_that_left_the_window_are_found_until_they_are_reused() -> None:
    cache = make_cache(12, WINDOW)
    first = make_request("a", range(40))
    compute_prompt(cache, first, 4)
    probe = make_request("b", [*range(16), 99])
    assert admit(cache, probe).num_cached_tokens == 16
    cache.free("b")
    compute_prompt(cache, make_request("filler", range(200, 264)), 16)
    cache.free("filler")
    probe = make_request("c", [*range(16), 99])
    assert admit(cache, probe).num_cached_tokens < 16


def test_a_hit_is_as_long_as_the_poorest_group_allows() -> None:
    cache = make_cache(24, FULL_AND_WINDOW)
    first = make_request("a", range(40))
    compute_prompt(cache, first, 16)
    cache.free("a")
    fillers = [make_request(f"f{number}", [*range(300 + number, 320 + number)]) for number in range(2)]
    for filler in fillers:
        compute_prompt(cache, filler, 16)
    probe = make_request("b", [*range(40), 99])
    grant = cache.admit(probe, 0)
    assert grant is None or grant.num_cached_tokens < 40
    cache.check_integrity([*fillers, *([probe] if grant else [])])


def test_cached_blocks_of_all_groups_are_held_before_any_group_takes_new_ones() -> None:
    cache = make_cache(50, FULL_AND_WINDOW)
    for name, tokens in (("a", range(40)), ("later", range(100, 160))):
        compute_prompt(cache, make_request(name, tokens), 16)
        cache.free(name)
    again = make_request("b", [*range(40), *range(200, 260)])  # new full blocks come from what was used least recently
    grant = admit(cache, again)
    assert grant.num_cached_tokens == 40
    assert not set(grant.blocks[0]) & set(grant.blocks[1][8:])
    cache.check_integrity([again])


def test_what_left_the_window_while_its_step_was_in_flight_is_published_after_it() -> None:
    cache = make_cache(100, WINDOW)
    first = make_request("a", range(64))
    admit(cache, first, 16)
    schedule(cache, first, 16)
    schedule(cache, first, 16)  # gives back blocks of the first step, which has not landed
    assert admit(cache, make_request("early", [*range(8), 99])).num_cached_tokens == 0
    cache.free("early")
    cache.publish_computed(first, 16)
    for length in (4, 8, 12, 16):
        probe = make_request("b", [*range(length), 99])
        assert admit(cache, probe).num_cached_tokens == length
        cache.free("b")
    cache.check_integrity([first])


def test_what_was_handed_out_again_before_its_step_landed_is_not_published() -> None:
    cache = make_cache(most_window_blocks(8, 16, 4) + 6, WINDOW)
    first = make_request("a", range(64))
    given_back = set(admit(cache, first, 16).blocks[0][:2])
    schedule(cache, first, 16)
    schedule(cache, first, 16)
    other = make_request("other", range(100, 124))
    admit(cache, other, 16)
    schedule(cache, other, 16)
    schedule(cache, other, 8)
    handed_out = given_back & set(cache._tables["other"].groups[0].blocks)
    assert handed_out
    cache.publish_computed(first, 16)
    found = {cache._pool.find(content) for content in first.block_hashes[:4]}
    assert not found & handed_out
    assert len(found - {None}) == 4 - len(handed_out)
    cache.check_integrity([first, other])


def test_of_two_steps_in_flight_the_first_publishes_only_its_own() -> None:
    cache = make_cache(100, WINDOW)
    first = make_request("a", range(64))
    admit(cache, first, 16)
    for _ in range(3):
        schedule(cache, first, 16)
    for landed in (16, 32):
        cache.publish_computed(first, landed)
        is_found = [cache._pool.find(content) is not None for content in first.block_hashes]
        assert is_found == [index < landed // 4 for index in range(16)]


def test_a_discarded_request_leaves_nothing_findable_also_of_what_left_its_window() -> None:
    cache = make_cache(100, FULL_AND_WINDOW)
    for name, base in (("kept", 0), ("dropped", 100)):
        compute_prompt(cache, request := make_request(name, range(base, base + 40)), 16)
    cache.discard(request)
    assert admit(cache, make_request("a", [*range(40), 99])).num_cached_tokens == 40
    for length in (8, 24, 40):
        probe = make_request("b", [*range(100, 100 + length), 99])
        assert [len(blocks) for blocks in cache._find_hit(probe).blocks] == [0, 0]
    window_only = cache._indexes[1].keys(request.block_hashes)
    assert [cache._pool.find(content) for content in window_only] == [None] * 10


def test_after_a_reset_a_step_in_flight_publishes_nothing_that_was_given_back() -> None:
    cache = make_cache(100, WINDOW)
    first = make_request("a", range(64))
    admit(cache, first, 16)
    schedule(cache, first, 16)
    schedule(cache, first, 16)
    cache.reset_prefix_cache()
    cache.publish_computed(first, 16)
    assert admit(cache, make_request("b", [*range(8), 99])).num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_remembered_of_what_left_the_window() -> None:
    cache = make_cache(100, WINDOW, enable_prefix_caching=False)
    first = make_request("a", range(64))
    compute_prompt(cache, first, 16)
    assert cache._tables["a"].groups[0].unpublished == {}
    assert admit(cache, make_request("b", range(64))).num_cached_tokens == 0


def test_a_larger_step_than_the_cache_was_made_for_is_a_bug() -> None:
    cache = make_cache(100, WINDOW, chunk=4)
    request = make_request("a", range(64))
    admit(cache, request)
    with pytest.raises(IntegrityError, match="a step of 32 tokens"):
        cache.grow(request, 32)


def test_integrity_finds_a_lost_promise() -> None:
    cache = make_cache(100, WINDOW)
    request = make_request("a", range(64))
    admit(cache, request, 4)
    cache.check_integrity([request])
    cache._pool.num_promised -= 1
    with pytest.raises(IntegrityError, match="blocks are promised"):
        cache.check_integrity([request])


def test_common_blocks_are_those_that_all_requests_share() -> None:
    cache = make_cache(100, FULL_AND_WINDOW)
    compute_prompt(cache, make_request("a", range(20)), 16)
    assert cache.num_common_blocks() == 0
    admit(cache, make_request("b", [*range(20), 99]))
    assert cache.num_common_blocks() == 5
    admit(cache, make_request("c", [*range(8), 98]))
    assert cache.num_common_blocks() == 2
    admit(cache, make_request("d", [50]))
    assert cache.num_common_blocks() == 0


def test_without_a_full_group_there_are_no_common_blocks() -> None:
    cache = make_cache(100, WINDOW)
    compute_prompt(cache, make_request("a", range(20)), 16)
    admit(cache, make_request("b", [*range(20), 99]))
    assert cache.num_common_blocks() == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 12),
    st.integers(1, 24),
    st.booleans(),
    st.data(),
)
def test_alone_in_the_pool_a_request_of_the_capacity_always_fits(
    windows: list[int | None], num_tokens: int, num_extra: int, chunk: int, chunked: bool, data: st.DataObject
) -> None:
    if chunked:
        windows = [window and (windows[0] or 13) for window in windows]
    groups = group_layers(windows, chunked=chunked)
    needed = blocks_for_request(groups, num_tokens + num_extra, 4, chunk)
    cache = KVCache(needed, 4, True, groups, chunk)
    assert cache.capacity_tokens >= num_tokens + num_extra
    request = make_request("a", range(num_tokens))
    most_held = 0
    grant = cache.admit(request, 0, data.draw(st.integers(1, chunk)))
    assert grant is not None
    while request.num_computed_tokens < request.num_tokens:
        missing = request.num_tokens - request.num_computed_tokens
        schedule(cache, request, data.draw(st.integers(1, min(chunk, missing))))
        cache.publish_computed(request, request.num_computed_tokens)
        most_held = max(most_held, num_held(cache))
        cache.check_integrity([request])
        if request.num_computed_tokens == request.num_tokens < num_tokens + num_extra:
            request.token_ids.append(5)
    assert most_held <= needed
    cache.free("a")
    assert cache.num_free_blocks == needed
    assert cache.usage == 0.0


def test_a_load_of_a_window_model_brings_what_each_group_lacks() -> None:
    cache = make_cache(40, FULL_AND_WINDOW)
    first = make_request("first", range(16))
    compute_prompt(cache, first, 16)
    cache.free("first")
    longer = make_request("longer", range(30))
    runs = cache.reserve(longer, 7, 0)  # of tokens 0 to 27; those from 28 on see 21 and later ones
    assert runs is not None
    assert [(run.group, run.first, len(run.blocks)) for run in runs] == [(0, 4, 3), (1, 5, 2)]
    assert cache.num_blocks_of(7) == 9 == cache.holds.num_reserved
    cache.check_integrity([])
    assert cache.holds.publish("longer", 5)
    grant = cache.admit(longer, 0)
    assert grant is not None
    assert grant.num_cached_tokens == 28
    cache.holds.unreserve("longer")
    cache.check_integrity([longer])
    cache.free("longer")
    assert cache.num_available_blocks == 40


def test_what_a_save_keeps_of_a_window_is_not_what_its_request_was_promised() -> None:
    most = most_window_blocks(8, 16, 4)
    cache = make_cache(most + 4, WINDOW)
    request = make_request("a", range(100))
    request.limit(104)
    admit(cache, request, 16)
    schedule(cache, request, 16)
    cache.publish_computed(request, 16)
    runs, staying = cache.pinnable(request, cache.block_runs(request, 0, 4))
    assert (len(runs[0].blocks), staying) == (4, set())
    cache.holds.pin(1, runs[0].blocks, staying)
    assert cache.num_available_blocks == 0  # it took what nobody was promised
    cache.check_integrity([request])
    schedule(cache, request, 16)
    cache.publish_computed(request, 32)
    assert cache.pinnable(request, cache.block_runs(request, 4, 8)) == ([], set())  # for more there is no room
    while request.num_computed_tokens < 100:
        schedule(cache, request, min(16, 100 - request.num_computed_tokens))
        cache.publish_computed(request, request.num_computed_tokens)
        cache.check_integrity([request])
    last, staying = cache.pinnable(request, cache.block_runs(request, 23, 25))
    assert set(last[0].blocks) == staying  # which its window holds to its end in any case
    cache.holds.pin(2, last[0].blocks, staying)
    cache.check_integrity([request])
    cache.holds.unpin(1)
    cache.free("a")
    assert cache.num_available_blocks == cache.num_blocks - len(staying)
    cache.holds.unpin(2)
    cache.check_integrity([])
