"""One engine's events in order: which batches to apply, and what to ask for when some are missing. No I/O.

    dumping --Done--> live --gap--> replaying --Done--> live
       ^                |               |
       +--- silence ----+--- not kept --+

Batches that come while an answer is awaited wait for it, up to a bound; one that is dropped there is a gap again later.
Whoever owns a feed has one question open at a time, and asks it on a new connection when no answer comes, so that an
answer always belongs to the question.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pagefleet_protocol.kv_events import (
    Answer,
    Cleared,
    Done,
    Dump,
    DumpPart,
    EventBatch,
    KvEvent,
    Replay,
    Request,
    Stored,
)

SILENCE_S = 10.0
"""An engine with nothing to tell sends an empty batch every second."""
ANSWER_S = 5.0
"""Longest wait for the next part of an answer."""
MAX_WAITING = 1024
"""Batches kept while an answer is awaited."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
MAX_REPLAYS = 3
"""In a row; a gap that is still there then is closed by a dump."""

State = Literal["dumping", "replaying", "live"]


class EngineFeed:
    """The state of one incarnation's events.

    Attributes:
        num_gaps: gaps in the numbers so far.
        num_foreign: messages of another incarnation.

    Args:
        incarnation: whose messages count.
        now: monotonic, as of all methods.
    """

    def __init__(self, incarnation: str, now: float) -> None:
        self.num_gaps = 0
        self.num_foreign = 0
        self._incarnation = incarnation
        self._state: State = "dumping"
        self._question: Request | None = Dump()
        self._seq = 0
        self._dump_seq: int | None = None
        self._waiting: dict[int, EventBatch] = {}
        self._num_waiting_bytes = 0
        self._num_replays = 0
        self._heard_at = self._answered_at = now

    @property
    def is_live(self) -> bool:
        """Whether everything up to the newest batch has been passed on."""
        return self._state == "live"

    def take_question(self) -> Request | None:
        """Return what to ask the engine now, once."""
        question, self._question = self._question, None
        return question

    def published(self, batch: EventBatch, now: float) -> Iterator[KvEvent]:
        """Take a batch; yields the events that can be applied now. Must be read to its end."""
        if batch.incarnation != self._incarnation:
            self.num_foreign += 1
            return
        self._heard_at = now
        if batch.seq <= self._seq and self._state != "dumping":
            return  # known already
        self._keep(batch)
        if self._state == "live":
            yield from self._advance()
            self._settle(now)

    def answered(self, answer: Answer, now: float) -> Iterator[KvEvent]:
        """Take a part of an answer; yields the events that can be applied now. Must be read to its end."""
        if answer.incarnation != self._incarnation:
            self.num_foreign += 1
            return
        self._answered_at = now
        if self._state == "live":
            return
        if isinstance(answer, DumpPart):
            if self._state == "dumping":
                if answer.seq != self._dump_seq:
                    self._dump_seq = answer.seq
                    yield Cleared()
                yield Stored(answer.keys)
        elif isinstance(answer, EventBatch):
            if answer.seq > self._seq and self._state == "replaying":
                self._keep(answer)
                yield from self._advance()
        else:
            yield from self._done(answer, now)

    def tick(self, now: float) -> bool:
        """Look at the clock; returns whether the connection has to be made anew, with the question asked again."""
        if self._state == "live":
            if now - self._heard_at < SILENCE_S:
                return False
        elif now - self._answered_at < ANSWER_S:
            return False
        self._ask_for_dump(now)
        return True

    def _done(self, done: Done, now: float) -> Iterator[KvEvent]:
        if self._state == "dumping":
            if not done.complete:
                return  # asked again when the time is over
            if self._dump_seq is None:
                yield Cleared()
            self._seq = done.seq if self._dump_seq is None else self._dump_seq
            self._num_replays = 0
        elif not done.complete or self._num_replays >= MAX_REPLAYS:
            self._ask_for_dump(now)
            return
        for seq in [seq for seq in self._waiting if seq <= self._seq]:
            self._take(seq)
        self._state = "live"
        self._heard_at = now
        yield from self._advance()
        self._settle(now)

    def _keep(self, batch: EventBatch) -> None:
        if batch.seq not in self._waiting:
            self._waiting[batch.seq] = batch
            self._num_waiting_bytes += _size(batch)
        while len(self._waiting) > MAX_WAITING or self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._take(min(self._waiting))

    def _take(self, seq: int) -> EventBatch | None:
        batch = self._waiting.pop(seq, None)
        if batch is not None:
            self._num_waiting_bytes -= _size(batch)
        return batch

    def _advance(self) -> Iterator[KvEvent]:
        """Yield the events of the batches that follow without a gap."""
        while (batch := self._take(self._seq + 1)) is not None:
            self._seq = batch.seq
            yield from batch.events

    def _settle(self, now: float) -> None:
        """Ask for what lies before the batches that still wait."""
        if not self._waiting:
            self._num_replays = 0
            return
        self.num_gaps += 1
        self._num_replays += 1
        self._state = "replaying"
        self._question = Replay(self._seq + 1, min(self._waiting) - 1)
        self._answered_at = now

    def _ask_for_dump(self, now: float) -> None:
        self._state = "dumping"
        self._question = Dump()
        self._dump_seq = None
        self._num_replays = 0
        self._answered_at = now


def _size(batch: EventBatch) -> int:
    return sum(0 if isinstance(event, Cleared) else len(event.keys) for event in batch.events)
