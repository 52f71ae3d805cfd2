"""Notes and states of streams: what one side writes the other reads, and nothing else passes for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.handoff import (
    MARKS,
    HandoffError,
    Note,
    Shown,
    StreamState,
    decode_stream_state,
    encode_note,
    pack_tokens,
    split_body,
    take_note,
    unpack_tokens,
)

tokens = st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(sorted(MARKS))), max_size=6)
payloads = st.one_of(
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")),
    st.just(b'{"text":":pf AAAA 3\\n"}'),
    st.just(b":pf AAAAAA== 3"),
)


@given(tokens, st.integers(0, 10**12 - 1), st.integers(0, 10**6 - 1), payloads)
def test_a_note_comes_out_as_it_went_in_and_leaves_the_event(
    ids: list[int], num_chars: int, choice: int, payload: bytes
) -> None:
    event = b"data: " + payload + b"\n\n"
    noted = encode_note(ids, num_chars, choice) + event
    assert take_note(noted) == (event, Note(choice, pack_tokens(ids), num_chars))


def test_the_first_choice_is_written_as_it_was_before_there_were_several() -> None:
    assert encode_note([1], 2) == b":pf AQAAAA== 2\n"
    assert StreamState("0" * 32, 5, (Shown(3, 4),)).encode() == f"id={'0' * 32};created=5;tokens=3;chars=4"


def test_events_without_notes_pass_as_they_are() -> None:
    assert take_note(b"data: {}\n\n") == (b"data: {}\n\n", None)
    assert take_note(b"data: a :pf AAAA 1\n\n") == (b"data: a :pf AAAA 1\n\n", None)


@pytest.mark.parametrize("damaged", [b":pf AAA 1\n", b":pf AAAAAA== 1 \n", b": ping\n:pf AAAAAA== 1\n"])
def test_what_is_nearly_a_note_is_refused(damaged: bytes) -> None:
    with pytest.raises(HandoffError):
        take_note(damaged + b"data: x\n\n")


shown = st.builds(Shown, st.integers(0, 10**9 - 1), st.integers(0, 10**12 - 1))


@given(st.integers(0, 2**128 - 1), st.integers(0, 10**12 - 1), st.lists(shown, min_size=1, max_size=5))
def test_a_state_survives_its_header(number: int, created: int, choices: list[Shown]) -> None:
    state = StreamState(f"{number:032x}", created, tuple(choices))
    assert decode_stream_state(state.encode()) == state


@pytest.mark.parametrize("ids", [sorted(MARKS), [0, 1, 2**31], []])
def test_token_ids_and_marks_share_their_places(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert split_body(b"{}" + pack_tokens([7, 8]) + pack_tokens(ids), 2, len(ids)) == (b"{}", [7, 8], ids)
    assert all(mark > 2**32 - 16 for mark in MARKS)
