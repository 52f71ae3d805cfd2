"""The order of an engine's events: drops, duplicates, cut answers and restarts end with what the engine has."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagefleet_kv.events.history import History
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_events import (
    MAX_BATCH_EVENTS,
    Cleared,
    Done,
    Dump,
    DumpPart,
    EventBatch,
    KvEvent,
    KvEventError,
    Replay,
    Stored,
    decode_answer,
    decode_published,
    encode,
    pack_keys,
    unpack_keys,
)
from pagefleet_router.events.feed import ANSWER_S, MAX_REPLAYS, MAX_WAITING, SILENCE_S, EngineFeed
from pagefleet_router.prefix.exact import ExactIndex

from tests.example_counts import examples

NUM_BLOCKS = 8
FIRST, SECOND = "1" * 32, "2" * 32


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") * 4)


BLOCKS = st.lists(st.integers(1, NUM_BLOCKS), max_size=5, unique=True)


class FeedMachine(RuleBasedStateMachine):
    """An engine, a connection that loses and repeats, and a router's index of it."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.serial = 0
        self.index = ExactIndex()
        self.cached: set[int] = set()
        self.late: list[bytes] = []
        self.start_anew()

    def start_anew(self) -> None:
        self.serial += 1
        self.history = History(f"{self.serial:032x}", keys_per_message=2, max_batches=6)
        self.cached = set()
        self.index.join("e", NUM_BLOCKS)
        self.feed = EngineFeed(f"{self.serial:032x}", self.now)
        self.answer: list[bytes] = []
        self.seen_seq = 0

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.index.clear("e")
            else:
                change = self.index.add if isinstance(event, Stored) else self.index.remove
                change("e", unpack_keys(event.keys))

    def publish(self, batches: list[bytes], fates: Iterable[str] = ()) -> None:
        for batch, fate in zip(batches, [*fates, *["sent"] * len(batches)], strict=False):
            if fate == "lost":
                continue
            self.late.append(batch)
            for _ in range(2 if fate == "twice" else 1):
                self.deliver(batch)

    def deliver(self, batch: bytes) -> None:
        decoded = decode_published(batch)
        if decoded.incarnation == f"{self.serial:032x}":
            self.seen_seq = max(self.seen_seq, decoded.seq)
        self.apply(self.feed.published(decoded, self.now))
        self.hear_question()

    def hear_question(self) -> None:
        match self.feed.take_question():
            case Dump():
                self.answer = self.history.dump()
            case Replay() as replay:
                self.answer = self.history.replay(replay)

    fates = st.lists(st.sampled_from(["sent", "lost", "twice"]), max_size=8)

    @rule(stored=BLOCKS, removed=BLOCKS, fates=fates)
    def change(self, stored: list[int], removed: list[int], fates: list[str]) -> None:
        gone = [number for number in removed if number in self.cached and number not in stored]
        new = [number for number in stored if number not in self.cached]
        self.cached = (self.cached - set(gone)) | set(new)
        self.publish(self.history.tell(False, list(map(block, gone)), list(map(block, new))), fates)

    @rule(fates=fates)
    def clear(self, fates: list[str]) -> None:
        self.cached = set()
        self.publish(self.history.tell(True, (), ()), fates)

    @precondition(lambda self: self.answer)
    @rule(count=st.integers(1, 4))
    def some_of_the_answer(self, count: int) -> None:
        for message in self.answer[:count]:
            self.answer = self.answer[1:]
            self.apply(self.feed.answered(decode_answer(message), self.now))
        self.hear_question()

    @rule()
    def the_answer_is_lost(self) -> None:
        self.answer = []

    @rule(seconds=st.sampled_from([0.5, ANSWER_S, SILENCE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.feed.tick(self.now):
            self.answer = []
        self.hear_question()
        self.index.tick(self.now)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def something_old_comes(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.late)))

    @rule()
    def restart(self) -> None:
        self.start_anew()
        self.hear_question()

    def known(self) -> set[int]:
        return {
            number
            for number in range(1, NUM_BLOCKS + 1)
            if self.index.match(["e"], unpack_keys(pack_keys([block(number)]))) == [1]
        }

    @invariant()
    def live_means_equal(self) -> None:
        self.index.check_integrity()
        if self.feed.is_live and self.seen_seq == self.history.seq:
            assert self.known() == self.cached

    def teardown(self) -> None:
        if not hasattr(self, "history"):
            return
        for _ in range(8):  # a connection that works: heartbeats come, questions are answered
            self.now += ANSWER_S
            if self.feed.tick(self.now):
                self.answer = []
            self.hear_question()
            while self.answer:
                self.some_of_the_answer(len(self.answer))
            self.publish(self.history.tell(False, (), ()))
        assert self.feed.is_live
        assert self.known() == self.cached


FeedMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestFeed = FeedMachine.TestCase


def live_feed(seq: int = 0) -> EngineFeed:
    feed = EngineFeed(FIRST, 0.0)
    assert feed.take_question() == Dump()
    assert list(feed.answered(Done(FIRST, seq), 0.0)) == [Cleared()]
    assert feed.is_live
    return feed


def stored(seq: int, incarnation: str = FIRST) -> EventBatch:
    return EventBatch(incarnation, seq, [Stored(pack_keys([block(seq)]))])


def test_a_gap_is_asked_for_once_and_filled_in_order() -> None:
    feed = live_feed()
    assert list(feed.published(stored(1), 0.0)) == stored(1).events
    assert list(feed.published(stored(4), 0.0)) == []
    assert list(feed.published(stored(5), 0.0)) == []
    assert feed.take_question() == Replay(2, 3)
    assert feed.take_question() is None
    assert (feed.is_live, feed.num_gaps) == (False, 1)
    assert list(feed.answered(stored(2), 0.0)) == stored(2).events
    assert list(feed.answered(stored(3), 0.0)) == [event for seq in (3, 4, 5) for event in stored(seq).events]
    assert list(feed.answered(Done(FIRST, 5), 0.0)) == []
    assert feed.is_live


def test_what_is_not_kept_any_more_is_dumped() -> None:
    feed = live_feed(seq=3)
    list(feed.published(stored(9), 0.0))
    assert feed.take_question() == Replay(4, 8)
    list(feed.answered(Done(FIRST, 9, complete=False), 0.0))
    assert feed.take_question() == Dump()
    part = DumpPart(FIRST, 9, pack_keys([block(1)]))
    assert list(feed.answered(part, 0.0)) == [Cleared(), Stored(part.keys)]
    assert list(feed.answered(part, 0.0)) == [Stored(part.keys)], "the second part of the same dump"
    list(feed.answered(Done(FIRST, 9), 0.0))
    assert feed.is_live


def test_replays_that_do_not_help_end_in_a_dump() -> None:
    feed = live_feed()
    list(feed.published(stored(9), 0.0))
    for _ in range(MAX_REPLAYS - 1):
        assert isinstance(feed.take_question(), Replay)
        list(feed.answered(Done(FIRST, 9), 0.0))
    assert isinstance(feed.take_question(), Replay)
    list(feed.answered(Done(FIRST, 9), 0.0))
    assert feed.take_question() == Dump()


def test_another_incarnation_changes_nothing() -> None:
    feed = live_feed()
    assert list(feed.published(stored(1, SECOND), 0.0)) == []
    assert list(feed.answered(DumpPart(SECOND, 1, b"12345678"), 0.0)) == []
    assert (feed.num_foreign, feed.is_live, feed.take_question()) == (2, True, None)
    assert list(feed.published(stored(1), 0.0)) == stored(1).events


def test_silence_and_late_answers_are_asked_about_on_a_new_connection() -> None:
    feed = live_feed()
    assert not feed.tick(SILENCE_S - 0.1)
    assert feed.tick(SILENCE_S)
    assert (feed.take_question(), feed.is_live) == (Dump(), False)
    assert not feed.tick(SILENCE_S + ANSWER_S - 0.1)
    assert feed.tick(SILENCE_S + ANSWER_S)
    assert feed.take_question() == Dump()


def test_what_waits_is_bounded() -> None:
    feed = EngineFeed(FIRST, 0.0)
    for seq in range(1, 3 * MAX_WAITING):
        assert list(feed.published(EventBatch(FIRST, seq, []), 0.0)) == []
    list(feed.answered(Done(FIRST, 0), 0.0))
    assert feed.take_question() == Replay(1, 2 * MAX_WAITING - 1), "the oldest were let go"
    large = Stored(bytes(3 * 1024 * 1024))
    for seq in range(1, 20):
        list(feed.published(EventBatch(FIRST, 3 * MAX_WAITING + seq, [large]), 0.0))
    assert feed._num_waiting_bytes <= 16 * 1024 * 1024


def test_a_batch_of_very_many_events_is_garbage() -> None:
    most = EventBatch(FIRST, 1, [Cleared()] * MAX_BATCH_EVENTS)
    assert decode_published(encode(most)) == most
    over = encode(EventBatch(FIRST, 1, [Cleared()] * (MAX_BATCH_EVENTS + 1)))
    for decode in (decode_published, decode_answer):
        with pytest.raises(KvEventError, match="length"):
            decode(over)
