"""Launch tables: every supported head fits a tile, and contexts are split only as far as it pays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels._triton import next_power_of_2
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import attention_tile, decode_splits, launch_table, padded_head_dim

ARCHITECTURES = ["sm_90", "interpreter", "sm_80", "gfx942"]


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
    ("programs", "max_seq_len", "expected"),
    [
        (8, 131072, 32),  # one sequence, long context: as many parts as allowed
        (64, 4096, 4),  # up to the 264 programs that fill the device
        (132, 4096, 2),
        (264, 131072, 1),  # a full device needs no parts
        (1, 64, 1),  # one tile cannot be cut
        (1, 100, 2),
        (1, 0, 1),
    ],
)
def test_decode_splits_fill_the_device(programs: int, max_seq_len: int, expected: int) -> None:
    assert decode_splits(launch_table("sm_90"), programs, max_seq_len, block_n=64) == expected


@settings(deadline=None)
@given(n=st.integers(1, 10_000))
def test_next_power_of_2(n: int) -> None:
    power = next_power_of_2(n)
    assert n <= power < 2 * n
    assert power & (power - 1) == 0
