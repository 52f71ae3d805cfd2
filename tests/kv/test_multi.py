"""Several connectors as one: the first that has it loads, all save, and every end is told once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagefleet_kv.bell import Bell
from pagefleet_kv.multi import MultiConnector
from pagefleet_kv.port import (
    AnswerDone,
    BlockRun,
    KVTransferStats,
    LoadDone,
    TransfersDone,
)

from tests.fakes.bells import rings
from tests.fakes.connector_scene import make_request
from tests.fakes.held_connector import HeldConnector

RUN = BlockRun(0, [3, 4], [])


class Child(HeldConnector):
    """Has so many tokens of every prompt."""

    def __init__(self, bell: Bell, has: int | None) -> None:
        super().__init__(bell.fileno())
        self.has = has
        self.wants_saves = True

    def loadable(self, request: object, num_cached_tokens: int) -> int | None:
        return self.has

    def save(self, request: object, runs: object) -> int | None:
        return super().save(request, [RUN]) if self.wants_saves else None  # type: ignore[arg-type]


@pytest.fixture
def bells() -> Iterator[list[Bell]]:
    bells = [Bell(), Bell()]
    yield bells
    for bell in bells:
        bell.close()


@pytest.fixture
def children(bells: list[Bell]) -> list[Child]:
    return [Child(bell, has) for bell, has in zip(bells, [8, 16], strict=True)]


@pytest.fixture
def multi(children: list[Child]) -> Iterator[MultiConnector]:
    multi = MultiConnector(children)
    yield multi
    multi.close()


def test_the_first_that_has_more_than_there_is_loads(multi: MultiConnector, children: list[Child]) -> None:
    one, two = make_request(range(20), "one"), make_request(range(20), "two")
    assert multi.loadable(one, 0) == 8
    multi.load(one, [RUN])
    assert multi.loadable(two, 8) == 16
    multi.load(two, [RUN])
    assert (children[0].loading, children[1].loading) == (["one"], ["two"])
    multi.cancel("two")
    assert (children[0].cancelled, children[1].cancelled) == ([], ["two"])
    children[0].done = TransfersDone([LoadDone("one", 2)])
    children[1].done = TransfersDone([LoadDone("two", 0)])
    assert multi.finished().loads == [LoadDone("one", 2), LoadDone("two", 0)]
    assert multi.finished() == TransfersDone([], [], [])


def test_one_that_does_not_know_is_waited_for(multi: MultiConnector, children: list[Child]) -> None:
    children[0].has = None
    assert multi.loadable(make_request(range(20)), 0) is None


def test_nobody_has_more(multi: MultiConnector) -> None:
    assert multi.loadable(make_request(range(20)), 16) == 0


def test_the_answer_that_counts_is_the_last_one(multi: MultiConnector, children: list[Child]) -> None:
    request = make_request(range(20))
    assert multi.loadable(request, 0) == 8
    children[0].has = 0
    assert multi.loadable(request, 0) == 16
    multi.load(request, [RUN])
    assert children[1].loading == ["r"]


def test_blocks_are_kept_until_the_last_has_saved_them(multi: MultiConnector, children: list[Child]) -> None:
    request = make_request(range(20))
    first, second = multi.save(request, [RUN]), multi.save(request, [RUN])
    assert None not in (first, second)
    assert first != second
    children[0].done = TransfersDone(saves=[1, 2])
    assert multi.finished().saves == []
    children[1].done = TransfersDone(saves=[2])
    assert multi.finished().saves == [second]
    children[1].done = TransfersDone(saves=[1])
    assert multi.finished().saves == [first]


def test_who_wants_no_save_is_not_waited_for(multi: MultiConnector, children: list[Child]) -> None:
    request = make_request(range(20))
    children[0].wants_saves = False
    number = multi.save(request, [RUN])
    children[1].done = TransfersDone(saves=[1])
    assert multi.finished().saves == [number]
    children[1].wants_saves = False
    assert multi.save(request, [RUN]) is None


def test_it_rings_while_one_of_them_does(multi: MultiConnector, bells: list[Bell]) -> None:
    def is_ringing() -> bool:
        return rings([multi.bell], 0)

    assert not is_ringing()
    for bell in bells:
        bell.ring()
        assert is_ringing()
        bell.silence()
        assert not is_ringing()


def test_all_are_told(multi: MultiConnector, children: list[Child]) -> None:
    multi.discard(make_request(range(20)))
    assert multi.ended(make_request(range(20)), True) is None
    multi.reset()
    multi.relieve(3)
    multi.drain()
    children[1].num_owed = 4
    assert multi.num_owed == 4
    assert [child.relieved for child in children] == [[3], [3]]
    assert all(child.is_draining for child in children)
    assert [child.ended_ids for child in children] == [[("r", True)]] * 2
    assert [child.discarded for child in children] == [["r"]] * 2
    assert [child.num_resets for child in children] == [1, 1]
    assert multi.stats() == KVTransferStats({"pagefleet_x_total": 0.0}, {"pagefleet_y": 4.0})
    multi.close()
    assert all(child.is_closed for child in children)


def test_an_answer_is_held_until_the_last_that_holds_it_is_done(multi: MultiConnector, children: list[Child]) -> None:
    for child in children:
        child.holds_answers = True
    first, second = (multi.ended(make_request(range(20), name), True) for name in "ab")
    children[0].done = TransfersDone(answers=[AnswerDone(1), AnswerDone(2)])
    assert multi.finished().answers == []
    children[1].done = TransfersDone(answers=[AnswerDone(2)])
    assert multi.finished().answers == [AnswerDone(second or 0)]
    children[1].done = TransfersDone(answers=[AnswerDone(1)])
    assert multi.finished().answers == [AnswerDone(first or 0)]


def test_an_answer_fails_with_the_first_that_fails(multi: MultiConnector, children: list[Child]) -> None:
    for child in children:
        child.holds_answers = True
    number = multi.ended(make_request(range(20)), True)
    children[1].done = TransfersDone(answers=[AnswerDone(1, "lost")])
    assert multi.finished().answers == [AnswerDone(number or 0, "lost")]
    children[0].done = TransfersDone(answers=[AnswerDone(1)])
    assert multi.finished().answers == []
