"""GGUF's blocks of any numbers, in scales of a size that weights have."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
_AT_END = ("Q3_K", "Q6_K", "TQ1_0", "TQ2_0")
_SCALE_AND_OFFSET = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int, deviation: float = 0.02) -> Blocks:
    """[rows, bytes] of rows of so many numbers, which deviate so much."""
    numbers, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // numbers, num_bytes), np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = random.integers(118, 124, len(blocks))
        return blocks.reshape(rows, -1)
    sizes = random.uniform(0.5, 1.5, (len(blocks), 2)).astype(np.float16)
    _put_scales(kind.name, blocks, sizes)
    unit = deviation / dequantize(blocks, kind).std()
    _put_scales(kind.name, blocks, (sizes * unit).astype(np.float16))
    return blocks.reshape(rows, -1)


def _put_scales(name: str, blocks: Blocks, scales: NDArray[np.float16]) -> None:
    both = scales.view(np.uint8)
    if name == "IQ1_M":  # in the upper halves of every other byte
        halves = np.stack((both[:, :2] & 15, both[:, :2] >> 4), -1).reshape(-1, 4)
        blocks[:, 49::2] = (blocks[:, 49::2] & 15) | (halves << 4)
    elif name in _AT_END:
        blocks[:, -2:] = both[:, :2]
    elif name == "Q2_K":
        blocks[:, -4:] = both
    else:
        count = 4 if name in _SCALE_AND_OFFSET else 2
        blocks[:, :count] = both[:, :count]
