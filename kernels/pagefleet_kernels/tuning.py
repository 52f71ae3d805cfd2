"""Launch parameters of the kernels: one table per GPU architecture, read from `tables/`.

Tiles are chosen by the size of a head, padded to a power of two, because shared memory is what limits them. Tables
that no benchmark has filled yet say `measured: false`: they are sized to fit, not tuned. PAGEFLEET_LAUNCH_TABLE names a
file, as `pagefleet bench kernels --tune` writes it, that replaces the table of its architecture.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from pagefleet_kernels._triton import next_power_of_2
from pagefleet_kernels.dispatch import architecture
from pagefleet_kernels.errors import LaunchTableError, UnsupportedShapeError

TABLE_VARIABLE = "PAGEFLEET_LAUNCH_TABLE"
_TABLES = Path(__file__).with_name("tables")

MAX_HEAD_DIM = 256
MIN_PART_SHARE = 2  # of the longest part: what the shortest is where the device is full anyway
PARTS_WHERE_FULL = 16  # at most; their sums take memory
_HOPPER = 90
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
    """One launch shape of a product with a quantized matrix, for up to `max_rows` rows."""

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
    measured: bool  # whether a benchmark on this architecture chose the attention tiles
    prefill: tuple[AttentionTile, ...]
    decode: tuple[AttentionTile, ...]
    decode_programs: int  # split the context until a decode step has about this many programs
    longest_part: int  # keys; contexts that can be longer are split even where the device is full
    max_splits: int
    tile_elements: int  # elements that a program of an elementwise kernel holds at once
    matmul: tuple[MatmulTile, ...]  # in the order of max_rows; the last one takes the rest
    packed: tuple[MatmulTile, ...]  # the same for weights of few bits, by floats
    experts: tuple[MatmulTile, ...]  # the same for experts' products, by the rows that each has on average


# float32 is multiplied without tensor cores, where larger tiles only spill registers
_FLOAT32_TILE = AttentionTile(MAX_HEAD_DIM, block_m=16, block_n=16, num_warps=4, num_stages=1)


@cache
def launch_table(architecture: str) -> LaunchTable:
    """The table of `architecture` ("sm_90"), or the default one, which fits everywhere. Raises LaunchTableError."""
    override = os.environ.get(TABLE_VARIABLE)
    if override:
        table = read_table(Path(override))
        if table.architecture == architecture:
            return table
    return _shipped_table(architecture)


@cache
def _shipped_table(architecture: str) -> LaunchTable:
    path = _TABLES / f"{architecture}.json"
    return read_table(path) if path.is_file() else _shipped_table("default")


def read_table(path: Path) -> LaunchTable:
    """The table in a file. Raises LaunchTableError where it is missing, damaged, or of another version."""
    try:
        return table_from_json(path.read_text())
    except OSError as error:
        raise LaunchTableError(f"the launch table {path} cannot be read: {error.strerror}") from error
    except LaunchTableError as error:
        raise LaunchTableError(f"the launch table {path}: {error}") from error


def table_to_json(table: LaunchTable) -> str:
    """The form in which a table is shipped and written by a benchmark."""
    return json.dumps(asdict(table), indent=1) + "\n"


def table_from_json(text: str) -> LaunchTable:
    """Inverse of `table_to_json`. Raises LaunchTableError."""
    try:
        fields = json.loads(text)
        for name, tile in (
            ("prefill", AttentionTile),
            ("decode", AttentionTile),
            ("matmul", MatmulTile),
            ("packed", MatmulTile),
            ("experts", MatmulTile),
        ):
            fields[name] = tuple(tile(**values) for values in fields[name])
        table = LaunchTable(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise LaunchTableError(f"not a launch table of this version ({error})") from error
    _check_table(table)
    return table


def _check_table(table: LaunchTable) -> None:
    for tiles in (table.prefill, table.decode):
        sizes = [tile.max_head_dim for tile in tiles]
        if sizes != sorted(sizes) or sizes[-1:] != [MAX_HEAD_DIM]:
            raise LaunchTableError(f"attention tiles must rise to heads of {MAX_HEAD_DIM}, not {sizes}")
        for tile in tiles:
            if any(side < MIN_DOT_SIDE or side & (side - 1) for side in (tile.block_m, tile.block_n)):
                raise LaunchTableError(f"{tile} is no tile: its sides must be powers of two from {MIN_DOT_SIDE} on")


def padded_head_dim(head_dim: int) -> int:
    """Side of the tile that holds one head. Raises UnsupportedShapeError above 256."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedShapeError(f"attention heads of {head_dim} are not supported: 1 to {MAX_HEAD_DIM} are")
    return max(MIN_DOT_SIDE, next_power_of_2(head_dim))


def attention_tile(
    tiles: tuple[AttentionTile, ...], head_dim: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> AttentionTile:
    """First tile of `tiles` that holds heads of `head_dim`; float32 has one of its own.

    `stored`: of keys and values; None: as `dtype`.

    Raises UnsupportedShapeError for other dtypes and for heads of more than 256.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedShapeError(f"attention in {dtype} is not supported: use bfloat16, float16 or float32")
    padded = padded_head_dim(head_dim)
    if dtype == torch.float32:
        return _FLOAT32_TILE
    tile = next(tile for tile in tiles if padded <= tile.max_head_dim)
    # masks of large heads take the registers of as many keys, and so do codes that become numbers
    is_crowded = padded > 128 and (head_dim < padded or (stored or dtype).itemsize == 1)
    return replace(tile, block_n=max(MIN_DOT_SIDE, tile.block_n // 2)) if is_crowded else tile


def matmul_tile(tiles: tuple[MatmulTile, ...], num_rows: int) -> MatmulTile:
    """First of the tiles that takes `num_rows`."""
    return next(tile for tile in tiles if num_rows <= tile.max_rows)


def all_registers(device: torch.device) -> dict[str, int]:
    """Options of a launch on NVIDIA's GPUs before Hopper: by itself the assembler puts some values of some kernels down
    there, to have one program more on a multiprocessor."""
    capability = architecture(device).removeprefix("sm_")
    is_before = capability.isdecimal() and int(capability) < _HOPPER and torch.version.hip is None
    return {"maxnreg": 255} if is_before else {}


def tile_warps(elements: int) -> int:
    """Warps that share a tile of an elementwise kernel: 16 elements for each lane, within 4 to 16 warps."""
    return min(16, max(4, elements // 512))


@dataclass(frozen=True, slots=True)
class Splits:
    """How contexts are cut."""

    parts: int
    """At most; a power of two."""
    min_keys: int = 0
    """Parts are no shorter: shorter contexts have fewer parts."""


WHOLE = Splits(1)


def decode_splits(table: LaunchTable, programs: int, max_seq_len: int, block_n: int) -> Splits:
    """How to cut each context, known without asking the device for a length.

    `programs` is the launch size without splitting (sequences times key heads); `max_seq_len` is what the block
    tables could hold. A device with room gets as many parts as fill it. On a full one, only long contexts are cut: a
    step takes as long as its longest program, and to read 16,384 keys alone takes longer than the rest of a step of 64
    sequences with 1,000 each.
    """
    parts = 1
    while parts < table.max_splits and programs * parts * 2 <= table.decode_programs and parts * block_n < max_seq_len:
        parts *= 2
    if parts > 1:
        return Splits(parts)
    while parts < min(table.max_splits, PARTS_WHERE_FULL) and parts * table.longest_part < max_seq_len:
        parts *= 2
    return Splits(parts, min_keys=table.longest_part // MIN_PART_SHARE)
