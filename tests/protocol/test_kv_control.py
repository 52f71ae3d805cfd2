"""Control messages of K/V transfers: every one there and back, and nothing else gets in."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_control import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    Abort,
    Ack,
    Body,
    Cancel,
    Commit,
    ControlMessage,
    Credit,
    Fetch,
    Hello,
    KvControlError,
    KvIncompatibleError,
    KvVersionError,
    Nack,
    Ping,
    Plane,
    Pong,
    Ready,
    Renew,
    Reserve,
    Want,
    Welcome,
    decode,
    encode,
)

HERE = b"h" * 32
THERE = b"t" * 32
ID = bytes(range(16))
SHAPE = KvShape(
    model="m",
    cache_dtype="bfloat16",
    compute_dtype="bfloat16",
    block_size=16,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    layout="nlkhbd",
)
BODIES: list[Body] = [
    Hello("a" * 32, ("nccl", "tcp")),
    Welcome("b" * 32, "tcp", b"secret", 30_000),
    Reserve(3, 5, 1 << 20, bytes(32)),
    Ack("commit"),
    Credit(1 << 40),
    Want(12),
    Ready(7),
    Fetch(),
    Commit(5, 5 << 20, 2, 0xFFFF_FFFF, 1500),
    Renew(),
    Cancel("not_needed"),
    Abort("the prefill request ended early"),
    Nack("incompatible", "another model", SHAPE),
    Ping(),
    Pong("b" * 32, True),
    Plane("nccl", bytes(128)),
]


def wire(number: int, body: bytes, *, version: int = 1, length: int | None = None) -> bytes:
    """Return a message with a right check sum, whatever is in it."""
    layout = struct.Struct("<4sHH32s16sQQII")
    fields = (b"PFKC", version, number, HERE, ID, 1, 2, len(body) if length is None else length)
    return layout.pack(*fields, zlib.crc32(body, zlib.crc32(layout.pack(*fields, 0)))) + body


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_comes_back_as_it_was(body: Body) -> None:
    message = ControlMessage(body, ID, 2**64 - 1, 9)
    assert decode(encode(message, HERE), HERE) == message
    assert decode(memoryview(encode(message, HERE)), HERE) == message


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_only_a_refusal_is_read_from_another_shape(body: Body) -> None:
    data = encode(ControlMessage(body), THERE)
    if isinstance(body, Nack):
        assert decode(data, HERE).body == body
    else:
        with pytest.raises(KvIncompatibleError):
            decode(data, HERE)


def test_the_version_is_compared_before_anything_else() -> None:
    newer = b"PFKC" + struct.pack("<HH", 2, 999) + b"whatever the next version holds"
    with pytest.raises(KvVersionError, match="version 2 of the K/V protocol, this engine 1"):
        decode(newer, HERE)


def test_the_shape_is_compared_before_the_body_is_decoded() -> None:
    with pytest.raises(KvIncompatibleError):
        decode(wire(1, b"\xc1 no msgpack"), THERE)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_field_too_many_or_too_few_is_refused(body: Body) -> None:
    number = 1 + BODIES.index(body)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(body))
    assert decode(wire(number, msgspec.msgpack.encode(fields)), HERE).body == body
    with pytest.raises(KvControlError):
        decode(wire(number, msgspec.msgpack.encode([*fields, 1])), HERE)
    required = sum(field.required for field in msgspec.structs.fields(body))
    if required:
        with pytest.raises(KvControlError):
            decode(wire(number, msgspec.msgpack.encode(fields[: required - 1])), HERE)


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (1, ["A" * 32, []]),
        (1, ["a" * 31, []]),
        (1, ["a" * 32, ["pickle"]]),
        (1, ["a" * 32, ["tcp"] * 9]),
        (2, ["b" * 32, "tcp", bytes(4097), 1]),
        (2, ["b" * 32, "tcp", b"", 0]),
        (3, [-1, 5, 0, bytes(32)]),
        (3, [0, 0, 0, bytes(32)]),
        (3, [0, 1, 0, bytes(31)]),
        (3, [0, 1, 2**63, bytes(32)]),
        (3, [0, 1.0, 0, bytes(32)]),
        (4, ["everything"]),
        (9, [1, 1, 1, 2**32, 0]),
        (11, ["because"]),
        (12, ["x" * 1025]),
        (15, ["b" * 32, 1]),
        (16, ["tcp", bytes(32 * 1024 + 1)]),
    ],
)
def test_values_out_of_their_range_are_refused(number: int, fields: list[object]) -> None:
    with pytest.raises(KvControlError):
        decode(wire(number, msgspec.msgpack.encode(fields)), HERE)


def test_sizes_and_types_are_checked() -> None:
    for data in (b"", b"PFKC", bytes(HEADER_BYTES), wire(8, b"\x90")[:-1], wire(8, b"\x90") + b"\x90"):
        with pytest.raises(KvControlError):
            decode(data, HERE)
    for number in (0, 17, 65535):
        with pytest.raises(KvControlError, match=f"type {number}"):
            decode(wire(number, b"\x90"), HERE)
    with pytest.raises(KvControlError, match="announced"):
        decode(wire(8, b"\x90", length=2), HERE)
    with pytest.raises(KvControlError, match="no control message"):
        decode(wire(12, bytes(MAX_MESSAGE_BYTES)), HERE)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(KvControlError):
        decode(wire(13, b"\x91" * 60_000), HERE)


@given(st.sampled_from(BODIES), st.data())
def test_a_turned_bit_is_found(body: Body, data: st.DataObject) -> None:
    sent = encode(ControlMessage(body, ID, 3, 4), HERE)
    bit = data.draw(st.integers(0, len(sent) * 8 - 1))
    spoiled = bytearray(sent)
    spoiled[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(KvControlError):
        decode(bytes(spoiled), HERE)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(KvControlError):
        decode(noise, HERE)


@given(st.integers(0, 20), st.binary(max_size=300))
def test_noise_behind_a_right_header_is_refused_or_fits_the_schema(number: int, noise: bytes) -> None:
    try:
        message = decode(wire(number, noise), HERE)
    except KvControlError:
        return
    assert type(message.body) is type(BODIES[number - 1])
