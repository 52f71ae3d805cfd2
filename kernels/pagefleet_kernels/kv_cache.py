"""Writing new keys and values into their pages; a pool in fp8 (e4m3 or e5m2) holds values divided by a scale.

Shapes: T tokens, K key heads, H head dim. A slot is `block_id * block_size + offset in the block`; slot -1 is padding.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes, encode_fp8, fp8_form, has_native_fp8
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.tuning import launch_table


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend | None = None,
) -> None:
    """Store the keys and values of T tokens at their slots of one layer's `kv_cache`, in place.

    `kv_cache` is a layer's view of the pool (see `layout`), strided as it is; `slot_mapping` holds int32 or int64.
    Tokens of slot -1 are skipped. Two tokens with one slot leave either of them. Values are cast to the cache's dtype;
    one of fp8 gets `value / scale`, at most its largest, and the scales matter to no other.
    """
    check_write(k_TKH, v_TKH, kv_cache, slot_mapping_T)
    if choose_backend(k_TKH.device, backend) == "torch":
        reference.write_kv(k_TKH, v_TKH, kv_cache, slot_mapping_T, k_scale, v_scale)
        return
    if k_TKH.shape[0] == 0:
        return
    keys, values = split_kv(as_bytes(kv_cache))
    _, num_heads, block_size, head_dim = keys.shape
    dim_padded = next_power_of_2(head_dim)
    tile_elements = launch_table(architecture(k_TKH.device)).tile_elements
    block_heads = min(next_power_of_2(num_heads), max(1, tile_elements // dim_padded))
    _write_kv_kernel[(k_TKH.shape[0], (num_heads + block_heads - 1) // block_heads)](
        keys,
        values,
        k_TKH,
        v_TKH,
        slot_mapping_T,
        k_TKH.stride(0),
        k_TKH.stride(1),
        v_TKH.stride(0),
        v_TKH.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        k_scale,
        v_scale,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        DIM_PADDED=dim_padded,
        FP8=fp8_form(kv_cache.dtype),
        NATIVE=has_native_fp8(kv_cache.device),
        **COMPILE_OPTIONS,
    )


def check_write(k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Refuse keys, values and slots that do not fit the pages."""
    _, num_heads, _, head_dim = split_kv(kv_cache)[0].shape
    if k_TKH.shape != v_TKH.shape or tuple(k_TKH.shape[1:]) != (num_heads, head_dim):
        raise UnsupportedShapeError(
            f"keys {list(k_TKH.shape)} and values {list(v_TKH.shape)} must both be [T, {num_heads}, {head_dim}], "
            "as the heads of kv_cache are"
        )
    if slot_mapping_T.shape != k_TKH.shape[:1]:
        raise UnsupportedShapeError(f"{k_TKH.shape[0]} tokens need as many slots, not {list(slot_mapping_T.shape)}")
    if k_TKH.stride(2) != 1 or v_TKH.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise UnsupportedShapeError("the last axis of keys, values and kv_cache must be contiguous")


@jit()
def store_kv(ptr, x, scale, mask, FP8: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store keys or values of any float into pages of theirs, or of fp8 as bytes; FP8: see `fp8_form`."""
    if FP8:
        tl.store(ptr, encode_fp8(x.to(tl.float32) / scale, FP8, NATIVE), mask=mask)
    else:
        tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@jit()
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    values_ptr,
    k_ptr,
    v_ptr,
    slot_mapping_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_head,
    stride_slot,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program per token and BLOCK_HEADS heads. Offsets into the pool are 64-bit: large pools pass 2^31 elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dim, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dim, mask=mask, other=0.0)
    page = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    offset = page + head * stride_head + dim
    store_kv(keys_ptr + offset, k, k_scale, mask, FP8, NATIVE)
    store_kv(values_ptr + offset, v, v_scale, mask, FP8, NATIVE)
