"""Blocks whose numbers are chosen four or eight at a time, as points of a grid: IQ1, IQ2 and IQ3.

Each number is a code of 4 bits: its place among the sizes of its grid, and in the highest bit its sign; with IQ1, which
way all of a run are moved. The layouts are those of ggml's `block_iq*` structures, and so are the grids, which its
authors chose: `grids.safetensors` has their points.

Shapes: B blocks, N numbers of a block, G groups within a block, K choices of a block.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pagefleet_engine.gguf.parts import Parts, bits, halves, nibbles_in_turns, pairs, table_of

_SIGN = 3
"""Its bit."""
_SIZES = {
    "iq2": (8, 25, 43, 0, 0, 0, 0, 0),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}
_IQ1 = (-0.875, 0.125, 1.125, 0, 0, 0, 0, 0, -1.125, -0.125, 0.875, 0, 0, 0, 0, 0)
"""One of -1, 0 and 1, and an eighth more or less."""


def iq2_xxs(blocks: Tensor) -> Parts:
    """In 2.06 bits."""
    runs = blocks[:, 2:].reshape(-1, 8, 8)
    signs_BN, scales_B8 = _signs_and_scales(runs[..., 4:])
    return _signed("iq2_xxs", "iq2", runs[..., :4], signs_BN, halves(blocks, 0) * (scales_B8 + 0.5) * 0.25)


def iq2_xs(blocks: Tensor) -> Parts:
    """In 2.31 bits."""
    words_BK = _words(blocks[:, 2:66])
    scales_BG = halves(blocks, 0) * (nibbles_in_turns(blocks[:, 66:]) + 0.5) * 0.25
    return _signed("iq2_xs", "iq2", words_BK & 511, _eighth_is_parity(words_BK >> 9), scales_BG)


def iq2_s(blocks: Tensor) -> Parts:
    """In 2.56 bits."""
    points_BK = _more(blocks[:, 2:34], pairs(blocks[:, 66:74], 1))
    scales_BG = halves(blocks, 0) * (nibbles_in_turns(blocks[:, 74:]) + 0.5) * 0.25
    return _signed("iq2_s", "iq2", points_BK, bits(blocks[:, 34:66]), scales_BG)


def iq3_xxs(blocks: Tensor) -> Parts:
    """In 3.06 bits."""
    signs_BN, scales_B8 = _signs_and_scales(blocks[:, 66:].reshape(-1, 8, 4))
    return _signed("iq3_xxs", "iq3_xxs", blocks[:, 2:66], signs_BN, halves(blocks, 0) * (scales_B8 + 0.5) * 0.5)


def iq3_s(blocks: Tensor) -> Parts:
    """In 3.44 bits."""
    points_BK = _more(blocks[:, 2:66], bits(blocks[:, 66:74]).flatten(1))
    scales_B8 = halves(blocks, 0) * (2.0 * nibbles_in_turns(blocks[:, 106:]) + 1)
    return _signed("iq3_s", "iq3_s", points_BK, bits(blocks[:, 74:106]), scales_B8)


def iq1_s(blocks: Tensor) -> Parts:
    """In 1.56 bits."""
    words_B8 = _words(blocks[:, 34:])
    points_BK = _more(blocks[:, 2:34], _threes(words_B8))
    scales_B8 = halves(blocks, 0) * (2.0 * (words_B8 >> 12 & 7) + 1)
    return _moved(points_BK, words_B8 >> 15, scales_B8)


def iq1_m(blocks: Tensor) -> Parts:
    """In 1.75 bits. The scale of all lies in the upper halves of every other byte of those of groups."""
    scale_B4, upper_BK = blocks[:, 49::2] >> 4, nibbles_in_turns(blocks[:, 32:48])
    scales_BG = halves(scale_B4[:, ::2] | scale_B4[:, 1::2] << 4, 0) * (2.0 * _threes(_words(blocks[:, 48:])) + 1)
    return _moved(_more(blocks[:, :32], upper_BK & 7), upper_BK >> 3, scales_BG)


def _signed(grid: str, sizes: str, points_BK: Tensor, signs: Tensor, scales_BG: Tensor) -> Parts:
    codes_BN = _numbers(grid, points_BK) | signs.to(torch.uint8).view(len(signs), -1) << _SIGN
    table = (*_SIZES[sizes], *(-size for size in _SIZES[sizes]))
    return Parts(codes_BN, scales_BG, None, table_of(table, points_BK))


def _moved(points_BK: Tensor, ways: Tensor, scales_BG: Tensor) -> Parts:
    """`ways`: 1 where the numbers of a run are moved down."""
    codes_BN = _numbers("iq1", points_BK)
    downward_BN = ways.to(torch.uint8).repeat_interleave(codes_BN.shape[1] // ways.shape[1], 1)
    return Parts(codes_BN | downward_BN << _SIGN, scales_BG, None, table_of(_IQ1, points_BK))


def _numbers(grid: str, points_BK: Tensor) -> Tensor:
    """uint8 [B, N] of chosen points."""
    chosen = F.embedding(points_BK.to(torch.int32), _grids(points_BK.device)[grid])
    return chosen.view(len(points_BK), -1)


@cache
def _grids(device: torch.device) -> dict[str, Tensor]:
    """uint8 [points, numbers of each], by name; the file has four numbers of IQ1 and IQ2 in a byte, two of IQ3."""
    stored = load_file(Path(__file__).with_name("grids.safetensors"), str(device))
    return {
        name: nibbles_in_turns(points) if name.startswith("iq3") else pairs(points, 1)
        for name, points in stored.items()
    }


def _words(pairs_of_bytes: Tensor) -> Tensor:
    """int32 [B, J / 2] of 16 bits each."""
    return pairs_of_bytes.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _more(lower_BK: Tensor, upper_BK: Tensor) -> Tensor:
    """int32 with the bits above eight."""
    return lower_BK.to(torch.int32) | upper_BK.to(torch.int32) << 8


def _threes(words: Tensor) -> Tensor:
    """[B, 4 J]: the lowest three bits of each, then the next, four times."""
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 7).flatten(1)


def _signs_and_scales(bytes_B84: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] and [B, 8] of words that have four times seven signs, and four bits of a scale."""
    words_B8 = bytes_B84.clone(memory_format=torch.contiguous_format).view(torch.int32).flatten(1)  # and so aligned
    shifts = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=words_B8.device)
    return _eighth_is_parity(words_B8[..., None] >> shifts), words_B8 >> 28 & 15


def _eighth_is_parity(sevens: Tensor) -> Tensor:
    """Eight signs of which the last makes the number of those that are negative even; [B, N]."""
    stored = bits(sevens, 7)
    parity = stored.sum(-1, keepdim=True, dtype=torch.int32) & 1
    return torch.cat((stored, parity), -1).flatten(1)
