"""GGUF files written byte by byte, so that anything in them can be a lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

_KINDS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def text(value: str) -> bytes:
    """A text with its length."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name: str, value: object) -> bytes:
    """An entry of the metadata."""
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    kind, form = _KINDS[type(value)]
    return text(name) + struct.pack("<I", kind) + struct.pack(form, value)


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """What the header says of a tensor; `shape` with rows first."""
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


@dataclass
class Header:
    """A header; `count` and so on are what it says, whatever it holds."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"
    count: int | None = None
    num_entries: int | None = None

    def data(self, num_bytes: int = 0, alignment: int = 32) -> bytes:
        """The file, with so many bytes of tensors."""
        count = len(self.tensors) if self.count is None else self.count
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        head = self.magic + struct.pack("<IQQ", self.version, count, num_entries)
        head += b"".join((*self.entries, *self.tensors))
        return head + bytes(-len(head) % alignment) + bytes(num_bytes)


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def llama(kind: int = 8, block_bytes: int = 34, more: Sequence[bytes] = ()) -> bytes:
    """A file of two tensors, in blocks of 32 numbers: an embedding of 320 tokens, and a matrix of 512 rows."""
    size = 256 // 32 * block_bytes
    tensors = [
        tensor("token_embd.weight", (320, 256), kind, 0),
        tensor("blk.0.ffn_up.weight", (512, 256), kind, 320 * size),
    ]
    entries = [entry(name, value) for name, value in LLAMA.items()]
    return Header([*entries, *more], tensors).data((320 + 512) * size)
