"""Notes and states of streams: what one side writes the other reads, and nothing else passes for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.handoff import (
    MARKS,
    HandoffError,
    StreamState,
    decode_stream_state,
    encode_note,
    pack_tokens,
    split_body,
    take_notes,
    unpack_tokens,
)

tokens = st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(sorted(MARKS))), max_size=6)
payloads = st.one_of(
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")),
    st.just(b'{"text":":pf AAAA 3\\n"}'),
    st.just(b":pf AAAAAA== 3"),
)


@given(st.lists(st.tuples(tokens, st.integers(0, 10**12 - 1), payloads), min_size=1, max_size=5))
def test_notes_come_out_as_they_went_in_and_leave_the_events(events: list[tuple[list[int], int, bytes]]) -> None:
    framed = [b"data: " + payload + b"\n\n" for _, _, payload in events]
    noted = b"".join(encode_note(ids, chars) + event for (ids, chars, _), event in zip(events, framed, strict=True))
    assert take_notes(noted) == (b"".join(framed), b"".join(pack_tokens(ids) for ids, _, _ in events), events[-1][1])


def test_events_without_notes_pass_as_they_are() -> None:
    assert take_notes(b"data: {}\n\n: ping\n\n") == (b"data: {}\n\n: ping\n\n", b"", None)
    assert take_notes(b"data: a :pf AAAA 1\n\n") == (b"data: a :pf AAAA 1\n\n", b"", None)
    with pytest.raises(HandoffError):
        take_notes(b":pf AAA 1\ndata: x\n\n")


@given(st.integers(0, 2**128 - 1), st.integers(0, 10**12 - 1), st.integers(0, 10**9 - 1), st.integers(0, 10**12 - 1))
def test_a_state_survives_its_header(number: int, created: int, num_tokens: int, num_chars: int) -> None:
    state = StreamState(f"{number:032x}", created, num_tokens, num_chars)
    assert decode_stream_state(state.encode()) == state


@pytest.mark.parametrize("ids", [sorted(MARKS), [0, 1, 2**31], []])
def test_token_ids_and_marks_share_their_places(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert split_body(b"{}" + pack_tokens([7, 8]) + pack_tokens(ids), 2, len(ids)) == (b"{}", [7, 8], ids)
    assert all(mark > 2**32 - 16 for mark in MARKS)
