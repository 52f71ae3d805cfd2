"""Blocks of K/V as bytes: the header that stands before them on disk, on a wire and in a folder, and what must agree.

A blob is a header of fixed size, then whole blocks one after the other, each as it lies in the pool. Two engines may
exchange blobs, and two starts of one, only where their `KvShape`s are equal. The header carries the hash of the shape,
so that a blob of another model, layout or version is refused before a byte of it is used.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

import msgspec

MAGIC = b"PFKV"
VERSION = 1
COMPATIBILITY_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 32

_HEADER = struct.Struct("<4sHH32s32sIIQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size


class BlobError(ValueError):
    """Bytes that are no blob of this version, shape or length; the message says which."""


def first_needed_block(num_computed_tokens: int, window: int, block_size: int, *, chunked: bool = False) -> int:
    """Return the first block that tokens from position `num_computed_tokens` on can see; `chunked`: of their chunk of
    `window` tokens, else over a window that slides."""
    if chunked:
        return num_computed_tokens // window * window // block_size
    return max(0, num_computed_tokens - window + 1) // block_size


class KvShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that decides what the bytes of a block mean. Tensor parallelism is apart: a planner joins its shards."""

    model: str
    """Digest of the model's configuration, revision and weights' names: hexadecimal."""
    cache_dtype: str
    compute_dtype: str
    block_size: int
    """Tokens per block."""
    num_layers: int
    num_kv_heads: int
    """Of the whole model, over all shards."""
    head_dim: int
    layout: str
    """Order of the axes within a block."""
    windows: tuple[int | None, ...] = (None,)
    """Of each KV group: tokens that each token sees at most, itself included; None for all."""
    chunked: bool = False
    """Windows are chunks: tokens see what is of their own, from its start."""
    parts: tuple[int, ...] = ()
    """Where stages share several groups: layers that each has in a block, whose bytes are theirs one by one."""

    @property
    def compatibility(self) -> bytes:
        """SHA-256 over all fields."""
        return hashlib.sha256(b"pagefleet kv shape 1" + msgspec.msgpack.encode(self)).digest()

    def needed_from(self, group: int, num_blocks: int) -> int:
        """Return the first block of a group that the tokens after a prefix of so many blocks can see."""
        window, num_tokens = self.windows[group], num_blocks * self.block_size
        return 0 if window is None else first_needed_block(num_tokens, window, self.block_size, chunked=self.chunked)

    def differences(self, other: KvShape) -> str:
        """Return what differs, as the end of a sentence: `block_size 16 here, 32 there`; empty where nothing does."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} {here} here, {there} there" for name, here, there in pairs if here != there)


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """What a blob says about itself."""

    compatibility: bytes
    """`KvShape.compatibility` of who wrote it."""
    name: bytes
    """32 bytes. A stored block's hash; a frame's transfer, epoch and number."""
    first_block: int
    """Index, in its request, of the first block."""
    num_blocks: int
    num_bytes: int
    """Of the payload."""
    checksum: int
    """CRC-32 of the payload."""
    group: int = 0
    """KV group of the blocks."""

    def encode(self) -> bytes:
        """Return HEADER_BYTES bytes."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            self.group,
            self.compatibility,
            self.name,
            self.first_block,
            self.num_blocks,
            self.num_bytes,
            self.checksum,
        )
        return head + _CHECK.pack(zlib.crc32(head))


def decode_header(data: bytes | memoryview, compatibility: bytes, block_bytes: int) -> BlobHeader:
    """Parse a header and check all of it that needs no payload.

    Args:
        data: at least HEADER_BYTES bytes.
        compatibility: of the reader.
        block_bytes: bytes of one block, by which the length must be explained.

    Raises:
        BlobError: it is something else, damaged, or of another version or shape.
    """
    if len(data) < HEADER_BYTES:
        raise BlobError(f"{len(data)} bytes are no header")
    head = data[: _HEADER.size]
    magic, version, group, theirs, name, first, count, num_bytes, checksum = _HEADER.unpack(head)
    if magic != MAGIC:
        raise BlobError("these bytes are no K/V blob")
    if version != VERSION:
        raise BlobError(f"the blob has version {version}, this engine reads {VERSION}")
    if _CHECK.unpack_from(data, _HEADER.size)[0] != zlib.crc32(head):
        raise BlobError("the header is damaged")
    if theirs != compatibility:
        raise BlobError("the blob is of another model, layout or type")
    if not 0 < num_bytes <= MAX_PAYLOAD_BYTES or num_bytes != count * block_bytes:
        raise BlobError(f"{num_bytes} bytes are not {count} blocks of {block_bytes}")
    return BlobHeader(theirs, name, first, count, num_bytes, checksum, group)
