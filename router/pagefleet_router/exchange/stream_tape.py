"""What another engine needs to go on with a stream: the tokens so far, and how much text the client has.

An engine that was asked for notes (`pagefleet_protocol.handoff`) puts one before each event. What the notes say of all
events that the client has makes another engine begin with the first one that it has not, choice by choice. Nothing has
to be generated a second time, so that it does not matter how tokens are chosen.
"""

from __future__ import annotations

import secrets

from pagefleet_protocol.handoff import (
    NOTE_START,
    PROMPT_START,
    HandoffError,
    Note,
    Shown,
    StreamState,
    count_tokens,
    take_note,
    take_prompt,
)

from pagefleet_router.errors import Failure

MAX_TOKENS = 64 * 1024
MAX_PROMPT_TOKENS = 256 * 1024
MAX_CHOICES = 256
"""A stream of more tokens or choices, or with a longer prompt to keep, keeps nothing, and cannot go on elsewhere."""

_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERRORS = (b'data: {"error":', b"event: error\n")
_LAST = (
    _DONE, b"event: message_stop\n", b"event: response.completed\n", b"event: response.incomplete\n",
    b"event: response.failed\n",
)  # fmt: skip
_ENGINE_GONE = (b'"code":"engine_dead"', b'"code":"server_shutting_down"')
"""Errors of the engine, not of the request: another one has a good chance."""
_DATA_LINE = b"\ndata:"


class StreamTape:
    """Takes the notes out of one stream, whatever number of engines it comes from.

    Args:
        created: what the answer gives as its time, seconds since the epoch.
    """

    __slots__ = (
        "_answer_id", "_created", "_held", "_needs_note", "_num_chars", "_room", "_tokens", "can_go_on", "done",
        "failure", "moved", "noted", "num_events", "num_tokens", "prompt",
    )  # fmt: skip

    def __init__(self, created: int) -> None:
        self.can_go_on = True
        """Whether another engine could take over now."""
        self.noted = False
        """Whether there has been a note: only then have the engines agreed on the answer's name."""
        self.moved = False
        """Whether the current engine has given an event."""
        self.done = False
        """Whether the client has the last event."""
        self.failure: Failure | None = None
        """Why nothing more of the current engine is passed on; ENDING: it says itself that it is gone."""
        self.num_events = 0
        """That the client has, where notes say of how many events they are."""
        self.num_tokens = 0
        """Of all choices, by the notes."""
        self.prompt = b""
        """Packed, where the engine tells it, as nobody else can make it."""
        self._answer_id = secrets.token_hex(16)
        self._created = created
        self._held = b""
        """The beginning of events that go together."""
        self._tokens = [bytearray()]
        """Packed, by choice."""
        self._num_chars = [0]
        self._room = 4 * MAX_TOKENS
        self._needs_note = False

    @property
    def tokens(self) -> bytes:
        """The tokens of all notes, packed, choice after choice."""
        return b"".join(self._tokens)

    def state(self) -> str:
        """Return the header that makes an engine begin, or go on from here."""
        choices = (Shown(len(ids) // 4, chars) for ids, chars in zip(self._tokens, self._num_chars, strict=True))
        return StreamState(self._answer_id, self._created, tuple(choices), self.num_events).encode()

    def next_engine(self, store: str | None = None) -> None:
        """Expect another engine to go on. `store`: of its responses, which their ids begin with."""
        if store is not None and not self.noted:
            self._answer_id = store + self._answer_id[len(store) :]
        self._held = b""
        self.failure = None
        self.moved = False
        self._needs_note = self.noted

    def give_up(self) -> None:
        """Keep nothing from now on; notes are still taken out."""
        self.can_go_on = False
        self.prompt = b""
        self._tokens = [bytearray() for _ in self._tokens]

    def take(self, events: bytes) -> bytes:
        """Return events without notes, up to the first one that is wrong, for which `failure` is set.

        Args:
            events: whole ones, each with its note before it; a part of one ends the chance to go on.
        """
        if not self.can_go_on and not self.noted:
            return events  # the engine gives no notes
        kept = []
        if self._held:
            events, self._held = self._held + events, b""
        start, size = 0, len(events)
        try:
            while start < size and self.failure is None:
                end = events.find(_EVENT_END, start) + 2
                if end < 2:
                    self.give_up()
                    end = size
                event, note = take_note(events[start:end])
                if note is not None and note.num_events:
                    last = _end_of(events, end, note.num_events - 1)
                    if last < 0:
                        self._held = events[start:]
                        break
                    kept.append(self._batch(event, events[end:last], note))
                    end = last
                else:
                    kept.append(self._event(event, note))
                start = end
        except HandoffError:
            self.failure = Failure.GARBAGE
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _batch(self, first: bytes, rest: bytes, note: Note) -> bytes:
        """Take events that go together."""
        if (b"\n" + NOTE_START) in b"\n" + rest:
            raise HandoffError("a note stands among events that go together")
        self._event(first, note)
        self.num_events += note.num_events
        events = first + rest
        start = events.rfind(_EVENT_END, 0, len(events) - 2) + 2
        self.done = events.startswith(_LAST, 0 if start < 2 else start)
        return events

    def _event(self, event: bytes, note: Note | None) -> bytes:
        if note is None and event.startswith(_ERRORS):
            return self._error(event)
        if note is None:
            if event.startswith(PROMPT_START):
                self._keep_prompt(event)
                return b""
            if event.startswith(b":") and _DATA_LINE not in event:
                return event  # comments only: no part of the answer
            if self._needs_note:
                raise HandoffError("an engine goes on without notes")
        else:
            self.noted, self._needs_note = True, False
            self.num_tokens += count_tokens(note.tokens)
        self.moved = True
        if note is not None and (note.tokens or note.num_chars != self._chars_of(note.choice)):
            self._move(note)
        elif event != _DONE:
            self.give_up()  # another engine could not know that the client has it
        self.done = event == _DONE
        return event

    def _error(self, event: bytes) -> bytes:
        """Pass on an error, which is the end, unless another engine can do better."""
        if self.can_go_on and any(code in event for code in _ENGINE_GONE):
            self.failure = Failure.ENDING
            return b""
        self.give_up()
        return event

    def _keep_prompt(self, comment: bytes) -> None:
        self.noted = True
        if self.can_go_on:
            self.prompt += take_prompt(comment)
            if len(self.prompt) > 4 * MAX_PROMPT_TOKENS:
                self.give_up()

    def _chars_of(self, choice: int) -> int:
        return self._num_chars[choice] if choice < len(self._num_chars) else 0

    def _move(self, note: Note) -> None:
        if note.num_chars < self._chars_of(note.choice):
            raise HandoffError("an engine does not go on from where the stream is")
        if note.choice >= MAX_CHOICES:
            self.give_up()
            return
        while len(self._tokens) <= note.choice:
            self._tokens.append(bytearray())
            self._num_chars.append(0)
        self._num_chars[note.choice] = note.num_chars
        if self.can_go_on:
            self._tokens[note.choice] += note.tokens
            self._room -= len(note.tokens)
            if self._room < 0:
                self.give_up()


def _end_of(events: bytes, start: int, num: int) -> int:
    """Return where the next `num` events end; -1 where not all of them are there."""
    for _ in range(num):
        start = events.find(_EVENT_END, start) + 2
        if start < 2:
            return -1
    return start
