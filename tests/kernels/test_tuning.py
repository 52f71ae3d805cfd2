"""Launch tables: every supported head fits a tile, and contexts are split only as far as it pays."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels._triton import next_power_of_2
from pagefleet_kernels.errors import LaunchTableError, UnsupportedShapeError
from pagefleet_kernels.tuning import (
    TABLE_VARIABLE,
    attention_tile,
    decode_splits,
    launch_table,
    padded_head_dim,
    read_table,
    table_to_json,
)

ARCHITECTURES = ["sm_90", "interpreter", "sm_80", "gfx942"]
LARGE = replace(launch_table("default"), decode_programs=396, longest_part=4096)
"""Of a device that 396 programs fill."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(deadline=None)
@given(head_dim=st.integers(1, 256))
def test_every_head_fits_a_tile(architecture: str, dtype: torch.dtype, head_dim: int) -> None:
    table = launch_table(architecture)
    for tiles in (table.prefill, table.decode):
        tile = attention_tile(tiles, head_dim, dtype)
        assert head_dim <= padded_head_dim(head_dim) <= tile.max_head_dim
        assert min(tile.block_m, tile.block_n) >= 16
        assert tile.block_m == next_power_of_2(tile.block_m)
        assert tile.block_n == next_power_of_2(tile.block_n)


def test_unknown_architectures_share_the_default_table() -> None:
    assert launch_table("sm_80") is launch_table("gfx942")
    assert launch_table("sm_90") is not launch_table("sm_80")


def test_larger_heads_and_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match=r"512.*1 to 256"):
        padded_head_dim(512)
    with pytest.raises(UnsupportedShapeError, match=r"float64.*bfloat16"):
        attention_tile(launch_table("sm_90").prefill, 64, torch.float64)


@pytest.mark.parametrize(
    ("programs", "max_seq_len", "parts"),
    [
        (8, 131072, 32),  # one sequence, long context: as many parts as allowed
        (64, 4096, 4),  # up to the programs that fill the device
        (198, 4096, 2),
        (199, 4096, 1),  # a full device needs no parts
        (512, 131072, 16),  # but for contexts so long that others would wait for them
        (512, 16384, 4),
        (512, 4096, 1),
        (1, 64, 1),  # one tile cannot be cut
        (1, 100, 2),
        (1, 0, 1),
    ],
)
def test_decode_splits_fill_the_device(programs: int, max_seq_len: int, parts: int) -> None:
    assert decode_splits(LARGE, programs, max_seq_len, block_n=64).parts == parts


def test_only_a_full_device_keeps_parts_long() -> None:
    assert decode_splits(LARGE, 8, 131072, 64).min_keys == 0
    assert decode_splits(LARGE, 512, 131072, 64).min_keys == 2048


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = replace(launch_table("sm_90"), measured=True, decode_programs=7)
    path = tmp_path / "sm_90.json"
    path.write_text(table_to_json(table))
    assert read_table(path) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_programs": None}, "this version"),
        ({"warps": 4}, "warps"),
        ({"prefill": []}, "rise to heads of 256"),
        ({"decode": [{"max_head_dim": 256, "block_m": 24, "block_n": 16, "num_warps": 4, "num_stages": 1}]}, "power"),
        ({"decode": [{"max_head_dim": 256}]}, "this version"),
    ],
)
def test_damaged_tables_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = json.loads(table_to_json(launch_table("sm_90"))) | change
    path = tmp_path / "table.json"
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    with pytest.raises(LaunchTableError, match=rf"table\.json.*{message}"):
        read_table(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchTableError, match="cannot be read: No such file"):
        read_table(tmp_path / "none.json")
    (tmp_path / "text").write_text("sm_90")
    with pytest.raises(LaunchTableError, match="not a launch table"):
        read_table(tmp_path / "text")


def test_a_file_replaces_the_table_of_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(table_to_json(replace(launch_table("sm_90"), decode_programs=1)))
    monkeypatch.setenv(TABLE_VARIABLE, str(path))
    choose = launch_table.__wrapped__
    assert choose("sm_90").decode_programs == 1
    assert choose("sm_80") == launch_table("sm_80")


@settings(deadline=None)
@given(n=st.integers(1, 10_000))
def test_next_power_of_2(n: int) -> None:
    power = next_power_of_2(n)
    assert n <= power < 2 * n
    assert power & (power - 1) == 0
