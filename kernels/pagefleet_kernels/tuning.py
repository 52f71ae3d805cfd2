"""Launch parameters of the kernels, one table per GPU architecture.

Tiles are chosen by the size of a head, padded to a power of two, because shared memory is what limits them. Rows
that no benchmark has filled yet say `measured=False`: they are sized to fit, not tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels._triton import next_power_of_2
from pagefleet_kernels.errors import UnsupportedShapeError

MAX_HEAD_DIM = 256
MIN_DOT_SIDE = 16  # tensor cores multiply tiles of at least 16 by 16


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One launch shape of an attention kernel, for heads of up to `max_head_dim` elements."""

    max_head_dim: int
    block_m: int  # rows: query tokens times the query heads that share a key head
    block_n: int  # keys per step of the loop
    num_warps: int
    num_stages: int

    def with_rows(self, num_rows: int) -> AttentionTile:
        """The same with as many rows as hold `num_rows`, at least those of a tensor core."""
        return replace(self, block_m=max(MIN_DOT_SIDE, next_power_of_2(num_rows)))


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """One launch shape of a product in eight bits, for up to `max_rows` rows."""

    max_rows: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Launch parameters on one architecture. Tiles are in the order of `max_head_dim` and end at MAX_HEAD_DIM."""

    architecture: str
    measured: bool
    prefill: tuple[AttentionTile, ...]
    decode: tuple[AttentionTile, ...]
    decode_programs: int  # split the context until a decode step has about this many programs
    max_splits: int
    tile_elements: int  # elements that a program of an elementwise kernel holds at once
    matmul: tuple[MatmulTile, ...]  # in the order of max_rows; the last one takes the rest


# float32 is multiplied without tensor cores, where larger tiles only spill registers
_FLOAT32_TILE = AttentionTile(MAX_HEAD_DIM, block_m=16, block_n=16, num_warps=4, num_stages=1)

_DEFAULT = LaunchTable(
    architecture="default",  # fits the 99 KiB of shared memory of the smallest GPUs since Ampere
    measured=False,
    prefill=(
        AttentionTile(128, block_m=64, block_n=32, num_warps=4, num_stages=2),
        AttentionTile(256, block_m=32, block_n=32, num_warps=4, num_stages=2),
    ),
    decode=(
        AttentionTile(128, block_m=16, block_n=32, num_warps=4, num_stages=3),
        AttentionTile(256, block_m=16, block_n=32, num_warps=4, num_stages=2),
    ),
    decode_programs=216,
    max_splits=32,
    tile_elements=1024,
    matmul=(
        MatmulTile(16, block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
        MatmulTile(64, block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=2),
        MatmulTile(2**31, block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=2),
    ),
)

_TABLES = (
    LaunchTable(
        architecture="sm_90",
        measured=False,
        prefill=(
            AttentionTile(128, block_m=128, block_n=64, num_warps=8, num_stages=2),
            AttentionTile(256, block_m=64, block_n=64, num_warps=8, num_stages=2),
        ),
        decode=(
            AttentionTile(128, block_m=16, block_n=64, num_warps=4, num_stages=3),
            AttentionTile(256, block_m=16, block_n=32, num_warps=4, num_stages=3),
        ),
        decode_programs=264,  # two for each of the 132 multiprocessors
        max_splits=32,
        tile_elements=2048,
        matmul=(
            MatmulTile(16, block_m=16, block_n=32, block_k=128, num_warps=4, num_stages=5),
            MatmulTile(64, block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4),
            MatmulTile(2**31, block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4),
        ),
    ),
    LaunchTable(
        architecture="interpreter",  # small enough that the short contexts of tests take several steps
        measured=False,
        prefill=(AttentionTile(256, block_m=16, block_n=32, num_warps=4, num_stages=1),),
        decode=(AttentionTile(256, block_m=16, block_n=16, num_warps=4, num_stages=1),),
        decode_programs=8,
        max_splits=4,
        tile_elements=512,
        matmul=(MatmulTile(2**31, block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=1),),
    ),
)


def launch_table(architecture: str) -> LaunchTable:
    """The table of `architecture` ("sm_90"), or the default one, which fits everywhere."""
    return next((table for table in _TABLES if table.architecture == architecture), _DEFAULT)


def padded_head_dim(head_dim: int) -> int:
    """Side of the tile that holds one head. Raises UnsupportedShapeError above 256."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedShapeError(f"attention heads of {head_dim} are not supported: 1 to {MAX_HEAD_DIM} are")
    return max(MIN_DOT_SIDE, next_power_of_2(head_dim))


def attention_tile(tiles: tuple[AttentionTile, ...], head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """First tile of `tiles` that holds heads of `head_dim`; float32 has one of its own.

    Raises UnsupportedShapeError for other dtypes and for heads of more than 256.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedShapeError(f"attention in {dtype} is not supported: use bfloat16, float16 or float32")
    padded = padded_head_dim(head_dim)
    return _FLOAT32_TILE if dtype == torch.float32 else next(tile for tile in tiles if padded <= tile.max_head_dim)


def matmul_tile(table: LaunchTable, num_rows: int) -> MatmulTile:
    """First tile of the table that takes `num_rows`."""
    return next(tile for tile in table.matmul if num_rows <= tile.max_rows)


def tile_warps(elements: int) -> int:
    """Warps that share a tile of an elementwise kernel: 16 elements for each lane, within 4 to 16 warps."""
    return min(16, max(4, elements // 512))


def decode_splits(table: LaunchTable, programs: int, max_seq_len: int, block_n: int) -> int:
    """Parts into which each context is cut, a power of two, known without asking the device for a length.

    `programs` is the launch size without splitting (sequences times key heads); `max_seq_len` is what the block
    tables could hold. More parts than tiles would only be empty ones.
    """
    splits = 1
    while (
        splits < table.max_splits and programs * splits * 2 <= table.decode_programs and splits * block_n < max_seq_len
    ):
        splits *= 2
    return splits
