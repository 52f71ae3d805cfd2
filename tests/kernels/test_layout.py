"""The pool's layout: sizes without torch, and views that put every element where the map says."""

import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
import torch
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.layout import KVLayout, split_kv

LAYOUT = KVLayout(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=8, head_dim=16)


def test_shape_is_blocks_layers_kv_heads_slots_dims() -> None:
    assert LAYOUT.shape == (5, 3, 2, 2, 8, 16)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), (torch.float16, 2), ("float8_e4m3fn", 1)])
def test_bytes_per_block_covers_all_layers(dtype: str | torch.dtype, item: int) -> None:
    assert LAYOUT.bytes_per_block(dtype) == 3 * 2 * 2 * 8 * 16 * item


def test_bytes_per_block_is_what_torch_allocates() -> None:
    pool = torch.empty(LAYOUT.shape, dtype=torch.bfloat16)
    assert LAYOUT.bytes_per_block("bfloat16") * LAYOUT.num_blocks == pool.untyped_storage().nbytes()


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedShapeError, match=r"int3.*bfloat16"):
        LAYOUT.bytes_per_block("int3")


@pytest.mark.parametrize("field", ["num_blocks", "num_layers", "num_kv_heads", "block_size", "head_dim"])
def test_counts_must_be_positive(field: str) -> None:
    counts = {"num_blocks": 1, "num_layers": 1, "num_kv_heads": 1, "block_size": 1, "head_dim": 1}
    with pytest.raises(UnsupportedShapeError, match=field):
        KVLayout(**(counts | {field: 0}))  # type: ignore[arg-type]


def test_layer_view_shares_memory_and_is_strided() -> None:
    pool = torch.zeros(LAYOUT.shape)
    kv_cache = LAYOUT.layer_view(pool, 1)
    assert kv_cache.shape == (5, 2, 2, 8, 16)
    assert not kv_cache.is_contiguous()
    keys, values = split_kv(kv_cache)
    assert keys.stride() == values.stride()
    keys[4, 1, 7, 15] = 1.0
    values[0, 0, 0, 0] = 2.0
    assert pool[4, 1, 0, 1, 7, 15] == 1.0
    assert pool[0, 1, 1, 0, 0, 0] == 2.0
    assert pool.count_nonzero() == 2


def test_one_block_is_contiguous_over_all_layers() -> None:
    pool = torch.empty(LAYOUT.shape)
    assert pool[3].is_contiguous()
    assert pool[3].untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


def test_with_layers_outside_a_layer_is_contiguous_and_means_the_same() -> None:
    layout = replace(LAYOUT, order="layers")
    pool = layout.as_pool(torch.arange(prod(layout.shape)))
    assert pool.shape == layout.shape
    assert layout.layer_view(pool, 1).is_contiguous()
    assert not pool[3].is_contiguous()
    assert int(pool[0, 1, 0, 0, 0, 0]) == prod(layout.shape) // layout.num_layers
    assert LAYOUT.as_pool(torch.arange(prod(layout.shape))).is_contiguous()


def test_foreign_pools_and_layers_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="layout says"):
        LAYOUT.layer_view(torch.empty(5, 3, 2, 2, 16, 8), 0)
    with pytest.raises(UnsupportedShapeError, match=r"layers 0\.\.2"):
        LAYOUT.layer_view(torch.empty(LAYOUT.shape), 3)
    with pytest.raises(UnsupportedShapeError, match="layer_view"):
        split_kv(torch.empty(5, 3, 2, 8, 16))


def test_sizes_need_no_torch() -> None:
    code = (
        "import sys; from pagefleet_kernels.layout import KVLayout; "
        "KVLayout(1, 1, 1, 1, 1).bytes_per_block('bfloat16'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
