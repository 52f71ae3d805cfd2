"""A listener of the prefix cache knows at every moment what it holds, whatever the scheduler does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.block_pool import BlockPool
from pagefleet_engine.core.step import FailureKind
from pagefleet_protocol.block_hash import HASH_BYTES, BlockHash, extend_hashes, root_hash

from tests.engine.core.test_scheduler_traces import FailingTrace, Failure, engines, events
from tests.example_counts import examples
from tests.fakes.paged_worker import SCOPE, FakeEngine, ToldCache
from tests.fakes.request_traces import Event


def found_in(engine: FakeEngine) -> set[BlockHash]:
    """What the index names, in every group."""
    return set(engine.kv_cache._pool._block_of_hash)


def hashes(tokens: list[int], block_size: int = 4) -> list[BlockHash]:
    found: list[BlockHash] = []
    extend_hashes(found, root_hash(SCOPE), tokens, block_size)
    return found


@settings(max_examples=examples(200), deadline=None)
@given(engines, events)
def test_what_was_told_is_what_is_cached(engine: FakeEngine, trace: list[Event | Failure]) -> None:
    played = FailingTrace(engine)
    for index, event in enumerate(trace):
        played.play(event)
        if index % 7 == 6:
            engine.scheduler.reset_prefix_cache()
        assert engine.told.contents == found_in(engine)
    engine.run()
    assert engine.told.contents == found_in(engine)
    engine.scheduler.reset_prefix_cache()
    assert engine.told.contents == found_in(engine) == set()


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 5), (None, 4, 4, 4), (8,), (17, 3)])
def test_blocks_of_the_first_group_are_told_under_their_plain_hashes(windows: tuple[int | None, ...]) -> None:
    engine = FakeEngine(64, 4, windows=windows)
    prompt = list(range(17))
    engine.add("a", prompt)
    engine.run()
    told = hashes([*prompt, *engine.outcomes["a"].token_ids])
    assert len(told) == 5
    assert {content for content in engine.told.contents if len(content) == HASH_BYTES} == set(told)


def test_every_group_is_told_with_its_number() -> None:
    # Blocks that leave the window of the second group are evicted one by one; the first group's stay.
    engine = FakeEngine(24, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), windows=(None, 5))
    engine.add("a", list(range(33)))
    engine.run()
    plain = hashes(list(range(33)))
    assert set(plain) <= engine.told.contents
    assert plain[-1] + b"\x01" in engine.told.contents
    engine.add("b", [1] * 60)
    engine.run()
    assert plain[-1] + b"\x01" not in engine.told.contents
    assert engine.told.contents == found_in(engine)


def test_eviction_is_told() -> None:
    engine = FakeEngine(8, 4)
    engine.add("a", [1] * 17)
    engine.run()
    assert len(engine.told.contents) == 5
    engine.add("b", [2] * 28)
    engine.run()
    assert engine.told.contents == found_in(engine)
    assert not set(hashes([1] * 17)) <= engine.told.contents


def test_what_a_failed_request_touched_is_told_as_gone() -> None:
    engine = FakeEngine()
    engine.add("a", [1] * 17)
    engine.run()
    assert engine.told.contents
    engine.worker.failing["b"] = FailureKind.NOT_NUMBERS
    engine.add("b", [1] * 17)
    engine.run()
    assert engine.told.contents == found_in(engine)
    assert not set(hashes([1] * 17)) & engine.told.contents


def test_a_reset_clears_at_once_or_names_what_went() -> None:
    engine = FakeEngine()
    engine.add("a", [1] * 17)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    assert (engine.told.contents, engine.told.num_cleared) == (set(), 1)
    engine.add("b", [2] * 17)
    engine.run()
    engine.add("c", [3] * 17)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    assert engine.told.num_cleared == 1  # what the running request holds stays
    assert engine.told.contents == found_in(engine) == set(hashes([3] * 17))


def test_without_prefix_caching_nothing_is_told() -> None:
    engine = FakeEngine(enable_prefix_caching=False)
    engine.add("a", [1] * 17)
    engine.run()
    assert engine.told.contents == set()


def test_a_second_block_of_equal_content_is_not_told() -> None:
    told = ToldCache()
    pool = BlockPool(4, told)
    first, second = pool.allocate(2)
    content = BlockHash(b"x" * 32)
    pool.publish([first], [content])
    pool.publish([second], [content])
    pool.release([second])
    pool.allocate(3)
    assert told.contents == {content}
