"""Numbers without gaps, replays of what is kept, dumps that agree with their number, and messages of bounded size."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kv.events.history import KEYS_PER_MESSAGE, History
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_events import (
    KEY_BYTES,
    MAX_BATCH_BYTES,
    Cleared,
    Done,
    DumpPart,
    EventBatch,
    GroupEvents,
    KvEvent,
    Removed,
    Replay,
    Stored,
    decode_answer,
    decode_published,
    pack_keys,
    routing_key,
    unpack_keys,
)

from tests.example_counts import examples
from tests.fakes.kv_events_router import apply


def contents(*numbers: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(str(number).encode()).digest()) for number in numbers]


def in_group(group: int, *numbers: int) -> list[BlockHash]:
    """The same tokens' contents in another group, as a prefix cache calls them."""
    return [BlockHash(content + bytes([group])) for content in contents(*numbers)]


def read(messages: list[bytes]) -> list[EventBatch]:
    return [decode_published(message) for message in messages]


def dumped(history: History) -> tuple[set[int], int]:
    *parts, end = [decode_answer(message) for message in history.dump()]
    keys: set[int] = set()
    for part in parts:
        assert isinstance(part, DumpPart)
        assert part.seq == history.seq
        keys.update(unpack_keys(part.keys))
    assert isinstance(end, Done)
    assert end.complete
    return keys, end.seq


def test_a_batch_says_all_in_order() -> None:
    history = History("i")
    history.tell(False, (), contents(1))
    (batch,) = read(history.tell(True, contents(2), contents(3, 4)))
    events: list[KvEvent] = [Cleared(), Removed(pack_keys(contents(2))), Stored(pack_keys(contents(3, 4)))]
    assert batch == EventBatch("i", 2, events)
    assert dumped(history) == ({routing_key(content) for content in contents(3, 4)}, 2)


def test_other_groups_are_told_apart_with_their_numbers() -> None:
    history = History("i")
    history.tell(False, (), [*contents(1), *in_group(1, 1, 2)])
    (batch,) = read(history.tell(False, in_group(1, 1), [*in_group(2, 7), *contents(2)]))
    assert batch.events == [Stored(pack_keys(contents(2)))]
    assert batch.other_groups == [
        GroupEvents(1, [Removed(pack_keys(contents(1)))]),
        GroupEvents(2, [Stored(pack_keys(contents(7)))]),
    ]
    assert dumped(history) == ({routing_key(content) for content in contents(1, 2)}, 2)
    parts = [decode_answer(message) for message in history.dump(every_group=True)[:-1]]
    assert [(part.group_idx, unpack_keys(part.keys)[0]) for part in parts if isinstance(part, DumpPart)][1:] == [
        (1, routing_key(contents(2)[0])),
        (2, routing_key(contents(7)[0])),
    ]
    history.tell(True, (), ())
    assert len(history.dump(every_group=True)) == 1


class EarlierBatch(msgspec.Struct, tag="b", frozen=True, array_like=True):
    """What a reader knows that was built before there were groups."""

    incarnation: str
    seq: int
    events: list[KvEvent]


def test_a_reader_of_before_there_were_groups_hears_of_the_first_one() -> None:
    (message,) = History("i").tell(False, in_group(1, 4), [*contents(1), *in_group(1, 1, 2)])
    assert msgspec.msgpack.decode(message, type=EarlierBatch).events == [Stored(pack_keys(contents(1)))]
    earlier = msgspec.msgpack.encode(EarlierBatch("i", 1, [Stored(pack_keys(contents(1)))]))
    assert decode_published(earlier).other_groups == []


def test_nothing_to_say_is_a_batch_too() -> None:
    history = History("i")
    assert read(history.tell(False, (), ())) == [EventBatch("i", 1, [])]
    assert dumped(history) == (set(), 1)


def test_large_batches_and_dumps_are_split() -> None:
    history = History("i", keys_per_message=4)
    batches = read(history.tell(True, contents(*range(100, 105)), contents(*range(10))))
    assert [batch.seq for batch in batches] == [1, 2, 3, 4, 5, 6]
    sizes = [[len(event.keys) // KEY_BYTES for event in b.events if not isinstance(event, Cleared)] for b in batches]
    assert sizes == [[], [4], [1], [4], [4], [2]]
    assert len(history.dump()) == 4
    assert dumped(history) == ({routing_key(content) for content in contents(*range(10))}, 6)


def test_no_message_is_over_the_limit() -> None:
    history = History("i" * 32)
    many = [BlockHash(number.to_bytes(32, "little")) for number in range(KEYS_PER_MESSAGE * 2 + 1)]
    messages = [*history.tell(False, (), many), *history.dump()]
    assert len(messages) == 3 + 4
    assert max(map(len, messages)) < MAX_BATCH_BYTES / 4


@pytest.mark.parametrize(
    ("first", "last", "seqs"),
    [(1, 5, [1, 2, 3, 4, 5]), (2, 3, [2, 3]), (5, 5, [5]), (4, 99, [4, 5]), (6, 6, []), (9, 12, [])],
)
def test_replays(first: int, last: int, seqs: list[int]) -> None:
    history = History("i")
    for number in range(5):
        history.tell(False, (), contents(number))
    *batches, end = [decode_answer(message) for message in history.replay(Replay(first, last))]
    assert [batch.seq for batch in batches] == seqs
    assert end == Done("i", 5)


@pytest.mark.parametrize(("max_batches", "max_bytes"), [(3, 10**6), (10**6, 150)])
def test_what_is_not_kept_any_more_is_not_replayed_in_part(max_batches: int, max_bytes: int) -> None:
    history = History("i", max_batches=max_batches, max_bytes=max_bytes)
    for number in range(9):
        history.tell(False, (), contents(*range(number * 3, number * 3 + 3)))
    assert [decode_answer(m) for m in history.replay(Replay(5, 9))] == [Done("i", 9, complete=False)]
    assert [decode_answer(m).seq for m in history.replay(Replay(7, 9))] == [7, 8, 9, 9]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=12))
def test_replays_and_dumps_agree_with_the_batches(steps: list[tuple[bool, set[int], set[int]]]) -> None:
    history = History("i", keys_per_message=3)
    cached: set[int] = set()
    told: set[int] = set()
    for cleared, removed, stored in steps:
        cached = (set() if cleared else cached) - removed | stored
        for batch in read(history.tell(cleared, contents(*removed), contents(*stored))):
            apply(told, batch.events)
        assert told == {routing_key(content) for content in contents(*cached)} == dumped(history)[0]
    replayed: set[int] = set()
    if steps:
        *messages, _ = history.replay(Replay(1, history.seq))
        for batch in read(messages):
            apply(replayed, batch.events)
    assert replayed == told
