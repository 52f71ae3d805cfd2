"""Several connectors as one: the first that has a prompt's K/V loads it, all of them save."""

from __future__ import annotations

import select
from collections.abc import Sequence

from pagefleet_kv.port import (
    AnswerDone,
    BlockRun,
    KVConnector,
    KVRequest,
    KVTransferStats,
    LoadDone,
    TransfersDone,
)


class MultiConnector:
    """Implements `KVConnector` over others, in order of preference.

    A child that is asked about a request and does not know yet is waited for, as a later one would bring less.
    """

    def __init__(self, children: Sequence[KVConnector]) -> None:
        self._children = tuple(children)
        self._chosen: dict[str, KVConnector] = {}
        """Whom a request was to be loaded by when it was last asked about."""
        self._loading: dict[str, KVConnector] = {}
        self._saves: dict[int, int] = {}
        """Save -> how many children still read its blocks."""
        self._child_saves: dict[tuple[int, int], int] = {}
        """A child's place and its number -> the save."""
        self._num_saves = 0
        self._answers: dict[int, int] = {}
        """Answer that is held -> how many children still hold it."""
        self._child_answers: dict[tuple[int, int], int] = {}
        self._num_answers = 0
        self._bells = select.epoll()
        for child in self._children:
            if child.bell is not None:
                self._bells.register(child.bell, select.EPOLLIN)

    @property
    def bell(self) -> int:
        """Rings while any child's does."""
        return self._bells.fileno()

    def arrived(self, request: KVRequest) -> None:
        """All are told."""
        for child in self._children:
            child.arrived(request)

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        """The answer of the first child that could bring more than there is."""
        self._chosen.pop(request.request_id, None)
        for child in self._children:
            num_tokens = child.loadable(request, num_cached_tokens)
            if num_tokens is None:
                return None
            if num_tokens > num_cached_tokens:
                self._chosen[request.request_id] = child
                return num_tokens
        return 0

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        """Let the child load that answered for it."""
        child = self._loading[request.request_id] = self._chosen.pop(request.request_id)
        child.load(request, runs)

    def cancel(self, request_id: str) -> None:
        self._loading[request_id].cancel(request_id)

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """Offer the blocks to all; they are kept until the last child that wanted them is done."""
        wanted = [
            (place, number)
            for place, child in enumerate(self._children)
            if (number := child.save(request, runs)) is not None
        ]
        if not wanted:
            return None
        self._num_saves += 1
        self._saves[self._num_saves] = len(wanted)
        self._child_saves.update(dict.fromkeys(wanted, self._num_saves))
        return self._num_saves

    def relieve(self, num_blocks: int) -> None:
        """Ask all: a save ends with the last child that reads its blocks."""
        for child in self._children:
            child.relieve(num_blocks)

    def discard(self, request: KVRequest) -> None:
        """Tell all."""
        for child in self._children:
            child.discard(request)

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        """Tell all; the answer is held until the last child that holds it is done, or one has failed."""
        self._chosen.pop(request.request_id, None)
        held = [
            (place, number)
            for place, child in enumerate(self._children)
            if (number := child.ended(request, completed)) is not None
        ]
        if not held:
            return None
        self._num_answers += 1
        self._answers[self._num_answers] = len(held)
        self._child_answers.update(dict.fromkeys(held, self._num_answers))
        return self._num_answers

    def finished(self) -> TransfersDone:
        loads: list[LoadDone] = []
        saves: list[int] = []
        answers: list[AnswerDone] = []
        for place, child in enumerate(self._children):
            done = child.finished()
            loads += done.loads
            saves += [save for number in done.saves if (save := self._end_save(place, number)) is not None]
            answers += [one for answer in done.answers if (one := self._end_answer(place, answer)) is not None]
        for load in loads:
            del self._loading[load.request_id]
        return TransfersDone(loads, saves, answers)

    def reset(self) -> None:
        """Reset all."""
        for child in self._children:
            child.reset()

    def drain(self) -> None:
        """Tell all."""
        for child in self._children:
            child.drain()

    @property
    def num_owed(self) -> int:
        """Of all."""
        return sum(child.num_owed for child in self._children)

    def stats(self) -> KVTransferStats:
        """All figures together; a counter that two children have is the sum of theirs."""
        total = KVTransferStats()
        for child in self._children:
            stats = child.stats()
            for ours, theirs in ((total.counters, stats.counters), (total.gauges, stats.gauges)):
                for name, value in theirs.items():
                    ours[name] = ours.get(name, 0.0) + value
        return total

    def close(self) -> None:
        """Close all."""
        self._bells.close()
        for child in self._children:
            child.close()

    def _end_save(self, place: int, number: int) -> int | None:
        """Take in that a child is done with a save; returns the save if it was the last."""
        save = self._child_saves.pop((place, number))
        self._saves[save] -= 1
        if self._saves[save]:
            return None
        del self._saves[save]
        return save

    def _end_answer(self, place: int, done: AnswerDone) -> AnswerDone | None:
        """Take in that a child holds an answer no more; returns the answer that can be told now, if it can."""
        number = self._child_answers.pop((place, done.number))
        if number not in self._answers:  # another child's failure was told
            return None
        self._answers[number] -= 1
        if self._answers[number] and done.failure is None:
            return None
        del self._answers[number]
        return AnswerDone(number, done.failure)
