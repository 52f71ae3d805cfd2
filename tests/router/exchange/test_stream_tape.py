"""Notes out of streams, whatever the reads they come in; and what becomes of damaged ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.handoff import (
    Shown,
    StreamState,
    decode_stream_state,
    encode_note,
    encode_prompt,
    pack_tokens,
    unpack_tokens,
)
from pagefleet_router.errors import Failure
from pagefleet_router.exchange.answer_writer import EventHold
from pagefleet_router.exchange.stream_tape import MAX_CHOICES, MAX_PROMPT_TOKENS, MAX_TOKENS, StreamTape

from tests.fakes.noting_engine import DEAD, Noted, rest_of_answer, whole_answer

NAME = StreamState("a" * 32, 5)
EVENTS = whole_answer(NAME)


def reads(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut data into pieces of these sizes, over and over."""
    found, start, turn = [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        found.append(data[start : start + size])
        start, turn = start + size, turn + 1
    return found


def state_of(tape: StreamTape) -> StreamState:
    return decode_stream_state(tape.state())


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), cut=st.integers(0, 3000))
def test_at_every_cut_the_state_is_that_of_what_the_client_has(sizes: list[int], cut: int) -> None:
    wire = b"".join(noted.wire for noted in EVENTS)[:cut]
    hold, tape = EventHold(), StreamTape(5)
    passed = b"".join(tape.take(hold.push(part)) for part in reads(wire, sizes))
    events = [noted.event for noted in EVENTS]
    num = next(n for n in range(len(events) + 1) if b"".join(events[:n]) == passed)
    state = state_of(tape)
    assert state.choices[0].num_chars == (EVENTS[num - 1].num_chars if num else 0)
    rest = rest_of_answer(replace(NAME, choices=state.choices), unpack_tokens(tape.tokens))
    assert tape.done or [one.event for one in rest] == events[num:]
    assert tape.can_go_on
    assert tape.done == (num == len(events))
    assert tape.failure is None


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), lost=st.integers(0, len(EVENTS) - 1))
def test_two_halves_make_the_whole(sizes: list[int], lost: int) -> None:
    tape = StreamTape(5)
    half = b"".join(noted.wire for noted in EVENTS[:lost]) + EVENTS[lost].wire[:-3]
    hold = EventHold()
    passed = b"".join(tape.take(hold.push(part)) for part in reads(half, sizes))
    tape.next_engine()
    rest = b"".join(one.wire for one in rest_of_answer(state_of(tape), unpack_tokens(tape.tokens)))
    hold = EventHold()
    passed += b"".join(tape.take(hold.push(part)) for part in reads(rest, sizes))
    assert passed.replace(state_of(tape).answer_id.encode(), b"a" * 32) == b"".join(one.event for one in EVENTS)


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    at=st.integers(0, 2000),
    byte=st.integers(0, 255),
)
def test_whatever_byte_is_wrong_no_note_reaches_the_client(sizes: list[int], at: int, byte: int) -> None:
    data = bytearray(b"".join(noted.wire for noted in EVENTS))
    data[at % len(data)] = byte
    hold, tape = EventHold(), StreamTape(5)
    passed = b""
    for part in reads(bytes(data), sizes):
        if tape.failure is None and tape.can_go_on:
            passed += tape.take(hold.push(part))
    lines = passed.split(b"\n")
    assert not any(line.startswith(b":pf ") for line in lines)


@pytest.mark.parametrize(
    "damaged",
    [
        b":pf !!!! 1\n",
        b":pf AAAA 1\n",
        b":pf AAAAAA== x\n",
        b":pf AAAAAA==\n",
        b":pf  0\n:pf\xff 1\n:pf \n",
        b":pf AA=A 1\n",
    ],
)
def test_a_damaged_note_ends_the_engine_and_not_what_came_before(damaged: bytes) -> None:
    tape = StreamTape(5)
    good = EVENTS[0].wire + EVENTS[1].wire
    assert tape.take(good + damaged + b"data: {}\n\n" + EVENTS[2].wire) == EVENTS[0].event + EVENTS[1].event
    assert tape.failure is Failure.GARBAGE
    assert unpack_tokens(tape.tokens) == [*EVENTS[0].ids, *EVENTS[1].ids]


def test_text_goes_only_forward() -> None:
    tape = StreamTape(5)
    tape.take(Noted((1,), 5, b"data: 1\n\n").wire)
    assert tape.take(Noted((2,), 4, b"data: 2\n\n").wire) == b""
    assert tape.failure is Failure.GARBAGE


def test_each_choice_has_its_own_tokens_and_text() -> None:
    tape = StreamTape(5)
    for ids, chars, choice in (([1, 2], 3, 0), ([7], 9, 2), ([3], 4, 0), ([], 5, 1)):
        assert tape.take(encode_note(ids, chars, choice) + b"data: 1\n\n") == b"data: 1\n\n"
    assert state_of(tape).choices == (Shown(3, 4), Shown(0, 5), Shown(1, 9))
    assert unpack_tokens(tape.tokens) == [1, 2, 3, 7]
    tape.next_engine()
    assert tape.take(encode_note([8], 8, 2) + b"data: 2\n\n") == b"", "of another choice it would be well"
    assert tape.failure is Failure.GARBAGE


def test_more_choices_than_are_kept_end_the_chance_to_go_on() -> None:
    tape = StreamTape(5)
    event = b"data: 1\n\n"
    assert tape.take(encode_note([1], 1, MAX_CHOICES - 1) + event) == event
    assert tape.can_go_on
    assert tape.take(encode_note([1], 1, MAX_CHOICES) + event) == event
    assert (tape.can_go_on, tape.tokens, tape.failure) == (False, b"", None)


def test_an_engine_without_notes_is_believed_until_another_has_to_go_on() -> None:
    tape = StreamTape(5)
    plain = b"data: 1\n\ndata: 2\n\n"
    assert tape.take(plain) == plain
    assert (tape.can_go_on, tape.noted) == (False, False)
    tape = StreamTape(5)
    tape.take(EVENTS[0].wire)
    tape.next_engine()
    assert tape.take(plain) == b""
    assert tape.failure is Failure.GARBAGE


def test_an_event_that_no_note_tells_of_ends_the_chance_to_go_on() -> None:
    tape = StreamTape(5)
    tape.take(EVENTS[0].wire)
    assert tape.take(b"data: stray\n\n") == b"data: stray\n\n"
    assert not tape.can_go_on
    assert tape.take(EVENTS[1].wire) == EVENTS[1].event, "notes are still taken out"
    assert tape.tokens == b""


def test_errors_of_an_engine() -> None:
    tape = StreamTape(5)
    tape.take(EVENTS[0].wire)
    assert tape.take(DEAD) == b""
    failures = [tape.failure]
    tape.next_engine()
    assert [*failures, tape.failure] == [Failure.ENDING, None]
    other = b'data: {"error":{"code":"request_failed"}}\n\n'
    assert tape.take(other) == other
    assert not tape.can_go_on


def test_comments_are_no_part_of_the_answer() -> None:
    tape = StreamTape(5)
    assert tape.take(b": ping\n\n" + EVENTS[0].wire) == b": ping\n\n" + EVENTS[0].event
    assert tape.can_go_on
    assert unpack_tokens(tape.tokens) == list(EVENTS[0].ids)
    tape.take(b": ping\n" + EVENTS[1].event)
    assert not tape.can_go_on, "a comment does not hide an event without a note"


def test_what_is_kept_is_bounded() -> None:
    tape = StreamTape(5)
    many = list(range(MAX_TOKENS))
    assert tape.take(encode_note(many, 1) + b"data: 1\n\n") == b"data: 1\n\n"
    assert tape.tokens == pack_tokens(many)
    assert tape.take(encode_note([7], 2) + b"data: 2\n\n") == b"data: 2\n\n"
    assert (tape.can_go_on, tape.tokens) == (False, b"")
    assert tape.take(encode_note([7], 3) + b"data: 3\n\n") == b"data: 3\n\n"


def test_a_part_of_an_event_ends_the_chance_to_go_on() -> None:
    tape = StreamTape(5)
    assert tape.take(EVENTS[0].wire[:-2]) == EVENTS[0].event[:-2]
    assert not tape.can_go_on


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), num=st.integers(1, 20_000))
def test_a_prompt_that_the_engine_tells_is_kept_and_not_passed_on(sizes: list[int], num: int) -> None:
    ids = range(num)
    wire = encode_prompt(ids) + b"".join(noted.wire for noted in EVENTS)
    hold, tape = EventHold(), StreamTape(5)
    passed = b"".join(tape.take(hold.push(part)) for part in reads(wire, [*sizes, 9000]))
    assert passed == b"".join(one.event for one in EVENTS)
    assert unpack_tokens(tape.prompt) == list(ids)
    assert tape.can_go_on


def test_a_prompt_that_is_too_long_or_damaged() -> None:
    tape = StreamTape(5)
    pieces = encode_prompt(range(MAX_PROMPT_TOKENS + 1)).split(b"\n\n")[:-1]
    assert b"".join(tape.take(piece + b"\n\n") for piece in pieces) == b""
    assert (tape.can_go_on, tape.prompt) == (False, b"")
    assert tape.take(EVENTS[0].wire) == EVENTS[0].event, "notes are still taken out"
    for damaged in (b":pp !!\n\n", b":pp AAAA\n\n"):
        tape = StreamTape(5)
        assert tape.take(damaged) == b""
        assert tape.failure is Failure.GARBAGE
