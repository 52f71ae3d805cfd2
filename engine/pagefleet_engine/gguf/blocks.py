"""GGUF's types of numbers: blocks of a row, and what they stand for.

The layouts are those of ggml's `block_q*` structures. Shapes: B blocks, N numbers of a block, G groups within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.blocks import KINDS as NATIVE_KINDS
from pagefleet_kernels.native.blocks import decode_blocks
from pagefleet_kernels.native.library import Library
from pagefleet_protocol.model_config.gguf_types import KINDS, GgufKind
from torch import Tensor

from pagefleet_engine.gguf import grids
from pagefleet_engine.gguf.parts import Parts, bits, halves, nibbles, nibbles_in_turns, pairs, table_of

_SCALE_BYTES = 12
"""Of the K types' eight scales and eight minima, in 6 bits each."""


@dataclass(frozen=True, slots=True)
class BlockType(GgufKind):
    """A type of a tensor, and how its numbers are read."""

    plain: torch.dtype | None = None
    split: Callable[[Tensor], Parts] | None = None
    """uint8 [B, bytes] of whole blocks; None: numbers are plain."""

    def decode(self, blocks: Tensor) -> Tensor:
        """float32 [B, N] of uint8 [B, bytes]."""
        if self.split is not None:
            return self.split(blocks).values()
        assert self.plain is not None, "a type is plain or in blocks"
        return blocks.view(self.plain).to(torch.float32)

    def decode_into(self, out: Tensor, blocks: Tensor, native: Library | None) -> None:
        """Fill `out`, of B * N numbers in any shape, from uint8 [B, bytes]; on a CPU by `native` where it can."""
        if native is not None and self.name in NATIVE_KINDS and out.dtype in DTYPES and out.is_contiguous():
            decode_blocks(native, NATIVE_KINDS[self.name], blocks, out)
        elif len(blocks):  # without any torch does not know how they are cut
            out.copy_(self.decode(blocks).view(out.shape))


def _fifth_bits(packed_B4: Tensor) -> Tensor:
    """uint8 [B, 32] of 0 and 16."""
    return (bits(packed_B4) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(nibbles(blocks[:, 2:]).view(torch.int8) - 8, halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(nibbles(blocks[:, 4:]), halves(blocks, 0), -halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    codes_BN = nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Parts(codes_BN.view(torch.int8) - 16, halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes_BN = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Parts(codes_BN, halves(blocks, 0), -halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].contiguous().view(torch.int8), halves(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, 8] each of the K types that begin with two float16 and the 12 bytes."""
    low_B4, middle_B4, high_B4 = blocks[:, 4 : 4 + _SCALE_BYTES].view(len(blocks), 3, 4).unbind(1)
    scales_B8 = torch.cat((low_B4 & 63, (high_B4 & 15) | ((low_B4 >> 2) & 48)), 1)
    minima_B8 = torch.cat((middle_B4 & 63, (high_B4 >> 4) | ((middle_B4 >> 2) & 48)), 1)
    return halves(blocks, 0) * scales_B8.to(torch.float32), halves(blocks, 2) * minima_B8.to(torch.float32)


def _q4_k(blocks: Tensor) -> Parts:
    scales_B8, offsets_B8 = _scales_and_minima(blocks)
    codes_BN = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(len(blocks), -1)
    return Parts(codes_BN, scales_B8, offsets_B8)


def _q5_k(blocks: Tensor) -> Parts:
    scales_B8, offsets_B8 = _scales_and_minima(blocks)
    low_B8n = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(len(blocks), 8, 32)
    shifts_81 = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high_B8n = (blocks[:, 16:48].unsqueeze(1) >> shifts_81) & 1
    return Parts((low_B8n | (high_B8n << 4)).flatten(1), scales_B8, offsets_B8)


def _q6_k(blocks: Tensor) -> Parts:
    low_B8n = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(len(blocks), 8, 32)
    shifts_41 = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high_B8n = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts_41) & 3).view(len(blocks), 8, 32)
    codes_BN = (low_B8n | (high_B8n << 4)).flatten(1).view(torch.int8) - 32
    scales_BG = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return Parts(codes_BN, halves(blocks, 208) * scales_BG)


def _q2_k(blocks: Tensor) -> Parts:
    shared_BG = blocks[:, :16]
    scales_BG = halves(blocks, 80) * (shared_BG & 15).to(torch.float32)
    offsets_BG = halves(blocks, 82) * (shared_BG >> 4).to(torch.float32)
    return Parts(pairs(blocks[:, 16:80]), scales_BG, offsets_BG)


def _q3_k(blocks: Tensor) -> Parts:
    shifts_81 = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    upper_BN = ((blocks[:, :32].unsqueeze(1) >> shifts_81) & 1).flatten(1)
    codes_BN = (pairs(blocks[:, 32:96]) | (upper_BN << 2)).view(torch.int8) - 4
    low_BG = nibbles(blocks[:, 96:104])
    high_BG = pairs(blocks[:, 104:108], 4)
    scales_BG = (low_BG | (high_BG << 4)).view(torch.int8) - 32
    return Parts(codes_BN, halves(blocks, 108) * scales_BG.to(torch.float32))


def _tq2_0(blocks: Tensor) -> Parts:
    return Parts(pairs(blocks[:, :64]).view(torch.int8) - 1, halves(blocks, 64))


def _tq1_0(blocks: Tensor) -> Parts:
    """Bytes have five digits of a number in base 3, or the last four of them, as a fraction: its first digit is the
    whole part of three times it, and so on."""
    runs = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)[:, None]
    fractions_BN = torch.cat([(run.unsqueeze(1) * powers[:count]).flatten(1) for run, count in runs], 1)
    digits_BN = (fractions_BN.to(torch.int16) * 3 >> 8).to(torch.int8)
    return Parts(digits_BN - 1, halves(blocks, 52))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(nibbles(blocks[:, 2:]), halves(blocks, 0), None, table_of(_UNEVEN, blocks))


def _iq4_xs(blocks: Tensor) -> Parts:
    low_B8, high_B8 = nibbles_in_turns(blocks[:, 4:8]), pairs(blocks[:, 2:4], 1)
    scales_B8 = (low_B8 | (high_B8 << 4)).view(torch.int8) - 32
    codes_BN = nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1)
    return Parts(codes_BN, halves(blocks, 0) * scales_B8.to(torch.float32), None, table_of(_UNEVEN, blocks))


def _mxfp4(blocks: Tensor) -> Parts:
    """The numbers of its table are doubled, and so are the scales halved."""
    exponents_B1 = blocks[:, :1].to(torch.float64) - 128
    return Parts(
        nibbles(blocks[:, 1:]), torch.exp2(exponents_B1).to(torch.float32), None, table_of(_TWICE_E2M1, blocks)
    )


_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What IQ4's codes stand for."""
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_SPLITS = {
    2: _q4_0, 3: _q4_1, 6: _q5_0, 7: _q5_1, 8: _q8_0, 12: _q4_k, 13: _q5_k, 14: _q6_k,
    10: _q2_k, 11: _q3_k, 20: _iq4_nl, 23: _iq4_xs, 34: _tq1_0, 35: _tq2_0, 39: _mxfp4,
    16: grids.iq2_xxs, 17: grids.iq2_xs, 18: grids.iq3_xxs, 19: grids.iq1_s, 21: grids.iq3_s, 22: grids.iq2_s,
    29: grids.iq1_m,
}  # fmt: skip

BLOCK_TYPES = {
    number: BlockType(**asdict(kind), plain=_PLAIN.get(number), split=_SPLITS.get(number))
    for number, kind in KINDS.items()
}
"""By the number that a file has for each."""

BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
