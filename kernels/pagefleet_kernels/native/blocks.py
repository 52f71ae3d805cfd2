"""Matrices in GGUF's blocks on a CPU: as numbers, and as compiled products read them, each in one pass.

Shapes: B blocks, N numbers of a block, I inputs, O outputs, J bytes of a row.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.library import Blocks, Library
from pagefleet_kernels.native.quantized import MIDDLE, OFFSETS, STRIP, LaidOut

_BYTES_PER_THREAD = 1 << 16
"""That one thread lays out sooner than another wakes."""
_LARGE_PAGE = 2 << 20
_MOST_MAPPED = 1 << 14
"""Each takes two areas of memory, of which Linux lets a process have 65,530: without any left no thread starts."""
_mapped = WeakSet[mmap.mmap]()


class BlockKind(NamedTuple):
    """A kind of blocks, and what the kernels make of them."""

    number: int
    """Of the kind, as GGUF and kernels.h have it."""
    numbers: int
    num_bytes: int
    bits: int
    """That numbers are kept in."""
    group: int
    """Numbers that share a scale."""
    zeros: int
    shared: int = 0
    """As `LaidOut` has it."""

    @property
    def packed_bytes(self) -> int:
        """That a block's numbers and their scales take."""
        num_groups, parts = self.numbers // self.group, 2 if self.zeros == OFFSETS else 1
        scales = num_groups + 2 * (self.numbers // self.shared) if self.shared else 2 * num_groups
        return self.numbers * self.bits // 8 + parts * scales


KINDS = {
    "Q4_0": BlockKind(2, 32, 18, 4, 32, MIDDLE),
    "Q4_1": BlockKind(3, 32, 20, 4, 32, OFFSETS),
    "Q5_0": BlockKind(6, 32, 22, 8, 32, MIDDLE),
    "Q5_1": BlockKind(7, 32, 24, 8, 32, OFFSETS),
    "Q8_0": BlockKind(8, 32, 34, 8, 32, MIDDLE),
    "Q4_K": BlockKind(12, 256, 144, 4, 32, OFFSETS, 256),
    "Q5_K": BlockKind(13, 256, 176, 6, 32, OFFSETS, 256),
    "Q6_K": BlockKind(14, 256, 210, 6, 16, MIDDLE, 256),
}
"""By GGUF's names."""


def decode_blocks(library: Library, kind: BlockKind, blocks_BJ: Tensor, out: Tensor) -> None:
    """Fill `out`, contiguous of B * N numbers in one of DTYPES, from contiguous uint8 [B, J]; by the thread that
    calls."""
    is_whole = blocks_BJ.is_contiguous() and blocks_BJ.shape[1] == kind.num_bytes
    if out.dtype not in DTYPES or not is_whole or not _is_room_for(out, len(blocks_BJ) * kind.numbers):
        raise UnsupportedShapeError(
            f"blocks {list(blocks_BJ.shape)} of {kind.num_bytes} bytes are not read into {list(out.shape)} {out.dtype}"
        )
    is_bf16 = out.dtype == torch.bfloat16
    library.decode_blocks(kind.number, blocks_BJ.data_ptr(), len(blocks_BJ), out.data_ptr(), is_bf16)


def _is_room_for(out: Tensor, count: int) -> bool:
    return out.is_contiguous() and out.numel() == count


def lay_out_blocks(library: Library, kind: BlockKind, bytes_OJ: Tensor) -> LaidOut | None:
    """The same matrix in 4, 6 or 8 bits, from contiguous rows of uint8; None: a scale is no finite number.

    Where no scales are shared, what `lay_out` makes of the same numbers, bit for bit.
    """
    num_outputs, row_bytes = bytes_OJ.shape
    if bytes_OJ.stride(1) != 1 or row_bytes % kind.num_bytes:
        raise UnsupportedShapeError(f"rows {list(bytes_OJ.shape)} are not whole blocks of {kind.num_bytes} bytes")
    num_blocks = row_bytes // kind.num_bytes
    packed = new_memory(-(-num_outputs // STRIP) * STRIP * num_blocks * kind.packed_bytes)
    row_scales_O = torch.empty(num_outputs, dtype=torch.float32)
    blocks = Blocks(bytes_OJ.data_ptr(), bytes_OJ.stride(0), num_blocks * kind.numbers, num_outputs, kind.number)
    threads = min(torch.get_num_threads(), 1 + bytes_OJ.numel() // _BYTES_PER_THREAD)
    if not library.lay_out_blocks(blocks, packed.data_ptr(), row_scales_O.data_ptr(), threads):
        return None
    num_inputs = num_blocks * kind.numbers
    return LaidOut(row_scales_O, packed, num_inputs, kind.bits, kind.group, kind.zeros, shared=kind.shared)


def new_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in large pages where the system has them: to find and clear small ones takes longer than to
    fill them."""
    if num_bytes < _LARGE_PAGE or len(_mapped) >= _MOST_MAPPED or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Only what lies at their places is in large pages. The last of them is whole where little of it is for nothing.
    whole = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
    used = whole if whole - num_bytes <= num_bytes // 8 else num_bytes
    memory = mmap.mmap(-1, used + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mapped.add(memory)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, used)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=num_bytes)
