"""Which plane two engines agree on, what is asked for after one failed, and words that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.p2p.planes.device.link import Ear
from pagefleet_kv.p2p.planes.device.words import (
    Announce,
    BadWord,
    Envelope,
    Go,
    Join,
    Joined,
    Leave,
    Meet,
    Park,
    PleasePark,
    Seat,
    Taken,
    Want,
    Word,
    decode_word,
    encode_word,
)
from pagefleet_kv.p2p.planes.shell import LinkBroken
from pagefleet_kv.p2p.transfer.actions import Send
from pagefleet_kv.p2p.transfer.links import LEFT_OUT_S, Link
from pagefleet_kv.p2p.transfer.settings import P2PSettings, PeerTiming
from pagefleet_kv.p2p.transfer.source import Source
from pagefleet_protocol.kv_blob import HEADER_BYTES
from pagefleet_protocol.kv_control import ControlMessage, Hello, Nack, PlaneName, Welcome

from tests.fakes.byte_pages import SHAPE

WORDS: list[Word] = [
    Join(),
    Joined(),
    Leave("it stops"),
    Announce(3, 1, -(1 << 63), b"h" * HEADER_BYTES),
    Go(0),
    Taken((1 << 63) - 1),
    Want(1),
    Seat(2),
    Meet(3, b"i" * 128),
    PleasePark(4),
    Park(5),
]


@pytest.mark.parametrize(
    ("hello", "plane"),
    [
        (Hello("d" * 32, ("cuda_ipc", "nccl", "tcp"), "here"), "cuda_ipc"),
        (Hello("d" * 32, ("cuda_ipc", "nccl", "tcp"), "elsewhere"), "nccl"),
        (Hello("d" * 32, ("cuda_ipc", "nccl", "tcp")), "nccl"),
        (Hello("d" * 32, ("tcp",), "here"), "tcp"),
        (Hello("d" * 32, ("cuda_ipc",), "elsewhere"), None),
    ],
)
def test_the_first_plane_that_both_have_and_can_use_is_taken(hello: Hello, plane: PlaneName | None) -> None:
    names: tuple[PlaneName, ...] = ("cuda_ipc", "nccl", "tcp")
    source = Source(P2PSettings(1024), SHAPE, "a" * 32, {name: lambda peer: b"invited" for name in names}, "here")
    (answer,) = source.message("socket", ControlMessage(hello, seq=1), 100.0)
    assert isinstance(answer, Send)
    body = answer.message.body
    if plane is None:
        assert isinstance(body, Nack)
        assert "no data plane in common" in body.detail
    else:
        assert isinstance(body, Welcome)
        assert body.plane == plane


def asked(link: Link, now: float) -> tuple[PlaneName, ...]:
    """The planes of the next Hello."""
    (said,) = link.greet(now)
    assert isinstance(said, Send)
    assert isinstance(said.message.body, Hello)
    assert said.message.body.host == "here"
    return said.message.body.planes


def test_a_plane_that_failed_is_left_out_for_a_while() -> None:
    planes: tuple[PlaneName, ...] = ("cuda_ipc", "nccl", "tcp")
    link = Link("p:1", Hello("d" * 32, planes, "here"), PeerTiming())
    link.leave_out("cuda_ipc", 100.0)
    assert asked(link, 101.0) == ("nccl", "tcp")
    link.leave_out("nccl", 110.0)
    assert asked(link, 109.0 + LEFT_OUT_S) == ("tcp",)
    link.leave_out("tcp", 109.0 + LEFT_OUT_S)  # there is no other
    assert asked(link, 110.0 + LEFT_OUT_S) == planes


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_words_are_read_as_they_were_said(word: Word) -> None:
    envelope = Envelope(b"t" * 16, isinstance(word, Join), 1 << 40)
    assert decode_word(encode_word(envelope, word)) == (envelope, word)


def is_word_or_refused(data: bytes) -> bool:
    """Whether bytes are read as a word or end in `BadWord`, and in nothing else."""
    try:
        envelope, word = decode_word(data)
    except BadWord:
        return True
    return type(word) in map(type, WORDS) and len(envelope.token) == 16


@given(st.binary(max_size=200))
def test_bytes_are_a_word_or_are_refused(data: bytes) -> None:
    assert is_word_or_refused(data)


@given(st.sampled_from(WORDS), st.integers(0, 400), st.integers(1, 255))
def test_a_damaged_word_is_a_word_or_is_refused(word: Word, at: int, bits: int) -> None:
    data = bytearray(encode_word(Envelope(b"t" * 16, True, 0), word))
    data[at % len(data)] ^= bits
    assert is_word_or_refused(bytes(data))


@pytest.mark.parametrize(
    "word", [Announce(0, 0, 0, b"short"), Meet(1, b"i" * 127), Go(-1), Taken(1 << 63), Leave("x" * 2000)]
)
def test_words_out_of_bounds_are_refused(word: Word) -> None:
    with pytest.raises(BadWord):
        decode_word(encode_word(Envelope(b"t" * 16, True, 0), word))


def test_an_ear_hears_each_word_once_and_notices_a_lost_one() -> None:
    ear = Ear(b"t" * 16, num_heard=1)
    heard = [ear.is_next(Envelope(token, True, number)) for token, number in
             ((b"t" * 16, 0), (b"t" * 16, 1), (b"t" * 16, 1), (b"o" * 16, 2), (b"t" * 16, 2))]  # fmt: skip
    assert heard == [False, True, False, False, True]
    with pytest.raises(LinkBroken, match="lost"):
        ear.is_next(Envelope(b"t" * 16, True, 4))
