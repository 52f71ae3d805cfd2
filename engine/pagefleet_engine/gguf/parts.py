"""Blocks taken apart, and how bits lie in them.

Shapes: B blocks, N numbers of a block, G groups within a block, J bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks taken apart: a number stands for `scale * code - offset` of its group, or `scale * table[code]`."""

    codes_BN: Tensor
    """uint8, or int8 where they have a sign."""
    scales_BG: Tensor
    """float32"""
    offsets_BG: Tensor | None = None
    """float32"""
    table: Tensor | None = None
    """float32 [16]"""

    def values(self) -> Tensor:
        """float32 [B, N]"""
        codes_BN = self.codes_BN
        if self.table is not None:  # not table[codes], which might be a mask's and is refused by recordings
            codes_BN = self.table.index_select(0, codes_BN.flatten().to(torch.int32))
        codes_BGn = codes_BN.view(*self.scales_BG.shape, -1).to(torch.float32)
        values_BGn = codes_BGn.mul_(self.scales_BG[..., None])
        if self.offsets_BG is not None:
            values_BGn.sub_(self.offsets_BG[..., None])
        return values_BGn.view(len(codes_BGn), -1)


def halves(blocks: Tensor, start: int) -> Tensor:
    """float32 [B, 1] of a float16 in each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def nibbles(packed_BJ: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat((packed_BJ & 15, packed_BJ >> 4), -1)


def nibbles_in_turns(packed_BJ: Tensor) -> Tensor:
    """[B, 2 J]: the lower half of each byte, then its upper one."""
    return torch.stack((packed_BJ & 15, packed_BJ >> 4), -1).flatten(1)


def pairs(packed_BJ: Tensor, run: int = 32) -> Tensor:
    """uint8 [B, 4 J]: of so many bytes all lowest two bits, then the next, ..."""
    shifts_41 = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed_BJ.device)[:, None]
    return ((packed_BJ.reshape(len(packed_BJ), -1, 1, run) >> shifts_41) & 3).flatten(1)


def bits(packed_BJ: Tensor, count: int = 8) -> Tensor:
    """[..., J, count]: so many lowest bits of each number, the lowest first."""
    shifts = torch.arange(count, dtype=packed_BJ.dtype, device=packed_BJ.device)
    return (packed_BJ[..., None] >> shifts) & 1


def table_of(values: Sequence[float], like: Tensor) -> Tensor:
    """float32, on its device."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)
