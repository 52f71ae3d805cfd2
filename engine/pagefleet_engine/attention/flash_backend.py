"""Paged attention by FlashAttention, through torch's own `varlen_attn`: version 3 where it is installed, else 2.

Pages are read where they lie. Both versions want them as [num_blocks, block_size, K, H], and take any strides as long
as the numbers of a head are neighbours: so a layer's pages are transposed by strides, and nothing is copied. Version 2
reads pages whose tokens are a multiple of 256 (it computes addresses once for a tile of keys), version 3 any.
Writing, shared prefixes and whatever FlashAttention does not do stay with the Triton kernels. Nothing is planned on the
host, so a graph may hold every launch.

Shapes: T tokens, S sequences, B blocks per table, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pagefleet_kernels.layout import KVLayout, split_kv
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, Pages
from pagefleet_engine.attention.triton_backend import TritonAttentionStep, TritonBackend
from pagefleet_engine.core.kv_groups import KVGroups
from pagefleet_engine.errors import ConfigError

FlashVersion = Literal[2, 3]

FLASH_IS_FASTER: frozenset[str] = frozenset()
"""Architectures ("sm_90") where `auto` takes this backend, as bench/gpu_check.sh found; empty: none was measured."""

_PACKAGE_OF_3 = "flash_attn_interface"
_TOKENS_OF_2 = 256
_LARGEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16)


class FlashBackend:
    """Attention over a pool of `layout.shape` on a GPU, by FlashAttention where it can."""

    def __init__(
        self,
        pool: Tensor,
        layout: KVLayout,
        groups: KVGroups,
        *,
        version: FlashVersion | None = None,
        or_triton: bool = False,
    ) -> None:
        """`version`: None takes the newest there is. `or_triton`: layers that it cannot serve go to the Triton kernels.

        Raises ConfigError for a pool that no kernel takes; without `or_triton` also for one that FlashAttention does
        not take, and then a layer that it does not take raises ConfigError when it first attends.
        """
        self._triton = TritonBackend(pool, layout, groups)
        self._version: FlashVersion = version or newest_flash(pool.device)
        self._refusal = why_no_flash() or _why_not_pool(pool, layout, self._version)
        self._or_triton = or_triton
        self._refuse(self._refusal)
        if self._version == 3 and self._refusal is None and version is None:
            torch.nn.attention.activate_flash_attention_impl("FA3")

    def begin(self, batch: BatchGeometry) -> FlashAttentionStep:
        """Nothing to prepare: the kernels read the batch's tensors."""
        return FlashAttentionStep(self, self._triton.begin(batch), self._version)

    def takes(self, spec: AttentionSpec) -> bool:
        """Whether this layer attends by FlashAttention; raises ConfigError where it must and cannot."""
        refusal = self._refusal or _why_not_layer(spec)
        self._refuse(refusal)
        return refusal is None

    def _refuse(self, refusal: str | None) -> None:
        if refusal is not None and not self._or_triton:
            raise ConfigError(f"--attention-backend flash: {refusal}; use --attention-backend triton")


@dataclass(frozen=True, slots=True)
class FlashAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    backend: FlashBackend
    triton: TritonAttentionStep
    version: FlashVersion

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        self.triton.write(spec, k_TKH, v_TKH)

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        return self.triton.pages(spec)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        batch = self.triton.batch
        has_prefix = batch.num_common_blocks > 0 and not spec.is_local
        if not self.backend.takes(spec) or has_prefix:
            return self.triton.attend(spec, q_TNH)
        group, index = self.triton.places[spec.layer]
        return flash_attention(q_TNH, self.triton.layers[index], batch.block_tables[group], batch, spec, self.version)


def flash_attention(
    q_TNH: Tensor,
    kv_cache: Tensor,
    block_tables_SB: Tensor,
    batch: BatchGeometry,
    spec: AttentionSpec,
    version: FlashVersion,
) -> Tensor:
    """Attention output [T, N, H] of a layer that `FlashBackend` takes; tokens that belong to no sequence give zeros."""
    from torch.nn.attention import varlen  # noqa: PLC0415 not in every torch that we support

    pages_k, pages_v = (each.transpose(1, 2) for each in split_kv(kv_cache))
    one_each = batch.max_query_len == 1 and len(q_TNH) == len(batch.seq_lens_S)
    starts_S1 = batch.query_start_loc_S1
    read: tuple[Any, ...] = (
        q_TNH,
        pages_k,
        pages_v,
        starts_S1,
        starts_S1 if version == 2 else None,  # its numbers are not used, but 2 wants one and 3 none beside a table
        batch.max_query_len if one_each else max(batch.max_query_len, 2),
        block_tables_SB.shape[1] * kv_cache.shape[3] if batch.seq_lens is None else max(batch.seq_lens),
    )
    how: dict[str, Any] = {
        "scale": spec.scale,
        "enable_gqa": True,
        "seqused_k": batch.seq_lens_S,
        "block_table": block_tables_SB,
    }
    behind = -1 if spec.window is None else spec.window - 1
    if one_each:
        # One query sees all that is there: said without a mask, 2 reads keys once for the heads that share them, into a
        # tensor of its own, whichever it is given.
        window = (-1, -1) if spec.window is None else (behind, 0)
        attended: Any = varlen.varlen_attn(*read, window_size=window, **how)
        out_TNH: Tensor = attended.contiguous()
        return out_TNH
    make = torch.zeros if batch.query_lens is None else torch.empty  # a graph has tokens that belong to nobody
    out_TNH = make(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    varlen.varlen_attn_out(out_TNH, *read, window_size=(behind, 0), **how)
    return out_TNH


def newest_flash(device: torch.device) -> FlashVersion:
    """3 on Hopper where its package is installed, else 2."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return 3 if is_hopper and importlib.util.find_spec(_PACKAGE_OF_3) is not None else 2


def why_no_flash() -> str | None:
    """Why torch cannot attend to pages by FlashAttention; None: it can."""
    from torch.nn.attention import varlen  # noqa: PLC0415 loads what only this backend needs

    attend = getattr(varlen, "varlen_attn_out", None)
    if attend is None or "block_table" not in inspect.signature(attend).parameters:
        return f"torch {torch.__version__} does not attend to pages, 2.12 does"
    return None


def _why_not_pool(pool: Tensor, layout: KVLayout, version: FlashVersion) -> str | None:
    if layout.vectors != 2:
        return "FlashAttention reads keys and values, and this model keeps latents"
    if pool.dtype not in _DTYPES:
        return f"FlashAttention reads keys and values in 16 bits, not {str(pool.dtype).removeprefix('torch.')}"
    if layout.head_dim % 8 or layout.head_dim > _LARGEST_HEAD:
        return f"it takes heads whose size is a multiple of 8 up to {_LARGEST_HEAD}, not {layout.head_dim}"
    if version == 2 and layout.block_size % _TOKENS_OF_2:
        return (
            f"FlashAttention 2 reads blocks of {_TOKENS_OF_2} tokens, not {layout.block_size}: "
            f"give --block-size {_TOKENS_OF_2}, or on a Hopper GPU install FlashAttention 3"
        )
    return None


def _why_not_layer(spec: AttentionSpec) -> str | None:
    kinds = {
        "attention within chunks": spec.chunk,
        "a soft cap": spec.softcap,
        "attention sinks": spec.sinks_N,
        "ALiBi": spec.alibi_slopes_N,
    }
    found = next((name for name, value in kinds.items() if value is not None), None)
    return None if found is None else f"layer {spec.layer} has {found}, which torch does not pass to FlashAttention"
