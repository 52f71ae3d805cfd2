"""The difference between what is cached and what was told."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kv.events.publisher import CacheChanges, Changes
from pagefleet_protocol.block_hash import BlockHash

from tests.example_counts import examples

A, B, C = (BlockHash(name * 32) for name in (b"a", b"b", b"c"))


def test_nothing_happened() -> None:
    changes = CacheChanges()
    assert not changes.pending
    assert changes.take() is None


def test_the_order_of_a_prompt_is_kept() -> None:
    changes = CacheChanges()
    changes.stored([C, A])
    changes.stored([B])
    assert changes.pending
    assert changes.take() == Changes(False, [], [C, A, B])
    assert not changes.pending


def test_what_came_and_went_is_not_told() -> None:
    changes = CacheChanges()
    changes.stored([A, B])
    changes.removed([A])
    assert changes.take() == Changes(False, [], [B])
    changes.removed([B])
    changes.stored([B])
    assert changes.take() is None


def test_clearing_forgets_what_was_to_be_told() -> None:
    changes = CacheChanges()
    changes.stored([A])
    changes.cleared()
    changes.stored([B])
    assert changes.take() == Changes(True, [], [B])
    changes.cleared()
    assert changes.take() == Changes(True, [], [])


names = st.sampled_from([BlockHash(bytes([number]) * 32) for number in range(6)])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(names, st.sampled_from(["clear", "take"])), max_size=40))
def test_a_listener_that_looks_now_and_then_knows_all(operations: list[BlockHash | str]) -> None:
    changes = CacheChanges()
    cached: set[BlockHash] = set()
    told: set[BlockHash] = set()
    for operation in [*operations, "take"]:
        if operation == "take":
            taken = changes.take()
            if taken is not None:
                told = (set() if taken.cleared else told) - set(taken.removed) | set(taken.stored)
            assert told == cached
        elif operation == "clear":
            cached.clear()
            changes.cleared()
        elif isinstance(operation, bytes) and operation in cached:
            cached.remove(operation)
            changes.removed([operation])
        elif isinstance(operation, bytes):
            cached.add(operation)
            changes.stored([operation])


def test_two_threads_lose_nothing() -> None:
    changes = CacheChanges()
    told: list[BlockHash] = []
    done = threading.Event()

    def listen() -> None:
        while not done.is_set() or changes.pending:
            taken = changes.take()
            if taken is not None:
                told.extend(taken.stored)

    listener = threading.Thread(target=listen)
    listener.start()
    expected = [BlockHash(number.to_bytes(32, "little")) for number in range(20_000)]
    for start in range(0, len(expected), 7):
        changes.stored(expected[start : start + 7])
    done.set()
    listener.join(60)
    assert told == expected
