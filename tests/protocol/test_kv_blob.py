"""The header of K/V blobs: what is not exactly what its reader expects is refused before its payload is used."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.kv_blob import HEADER_BYTES, BlobError, BlobHeader, KvShape, decode_header

SHAPE = KvShape(
    model="m",
    cache_dtype="bfloat16",
    compute_dtype="bfloat16",
    block_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    layout="layers,kv,heads,tokens,dim",
)
BLOCK = 64
HEADER = BlobHeader(SHAPE.compatibility, b"n" * 32, 3, 2, 2 * BLOCK, zlib.crc32(b"x" * 2 * BLOCK))


def test_a_header_says_what_was_put_in() -> None:
    assert len(HEADER.encode()) == HEADER_BYTES
    assert decode_header(HEADER.encode(), SHAPE.compatibility, BLOCK) == HEADER


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(place: int, flip: int) -> None:
    data = bytearray(HEADER.encode())
    data[place] ^= flip
    with pytest.raises(BlobError):
        decode_header(bytes(data), SHAPE.compatibility, BLOCK)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(BlobError):
        decode_header(data, SHAPE.compatibility, BLOCK)


def test_a_length_that_the_blocks_do_not_explain_is_refused() -> None:
    with pytest.raises(BlobError, match="are not 2 blocks of 65"):
        decode_header(HEADER.encode(), SHAPE.compatibility, BLOCK + 1)


def test_shapes_that_differ_say_in_what() -> None:
    other = KvShape(**{name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__} | {"block_size": 32})
    assert other.compatibility != SHAPE.compatibility
    assert SHAPE.differences(other) == "block_size 16 here, 32 there"
    assert not SHAPE.differences(SHAPE)
    with pytest.raises(BlobError, match="another model, layout or type"):
        decode_header(HEADER.encode(), other.compatibility, BLOCK)
