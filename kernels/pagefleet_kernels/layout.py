"""Where keys and values lie in memory: the only place that knows the order of the KV pool's axes.

The pool is one tensor per worker, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: one block is
contiguous over all layers (transfer and offload move whole blocks), and a range of heads is contiguous in a block.
A layer sees the strided view `kv_cache = [num_blocks, 2, num_kv_heads, block_size, head_dim]`. Sizes need no torch.
Where a latent stands for keys and values the pool is `[num_blocks, num_layers, 1, 1, block_size, width]`: `vectors` and
heads are 1, and a layer's pages are `[num_blocks, block_size, width]`.

With `order="layers"` the same tensor lies in memory with its layers outside: one layer's pages are neighbours, and a
block is in as many pieces as there are layers, which nothing that moves blocks takes. Kernels run both, and
`pagefleet bench kernels` compares them; the order that serves is the default below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from pagefleet_kernels.errors import UnsupportedShapeError

if TYPE_CHECKING:
    import torch

Order = Literal["blocks", "layers"]
"""Which axis is outermost in memory."""

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one worker's KV pool. All fields are counts of at least 1; `num_kv_heads` are this worker's heads."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    order: Order = "blocks"
    vectors: int = 2
    """Of each head and token: a key and a value, or 1: a latent that both are made from."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_layers", "num_kv_heads", "block_size", "head_dim", "vectors"):
            if getattr(self, name) < 1:
                raise UnsupportedShapeError(f"{name} of a KV pool must be at least 1, not {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Shape of the pool tensor."""
        return (self.num_blocks, self.num_layers, self.vectors, self.num_kv_heads, self.block_size, self.head_dim)

    def bytes_per_block(self, dtype: str | torch.dtype) -> int:
        """Bytes of one block over all layers; `dtype` by name ("bfloat16") or as a torch dtype."""
        name = str(dtype).removeprefix("torch.")
        if name not in _ITEM_BYTES:
            raise UnsupportedShapeError(f"a KV pool cannot hold {name}: choose one of {', '.join(_ITEM_BYTES)}")
        return prod(self.shape[1:]) * _ITEM_BYTES[name]

    def as_pool(self, flat: torch.Tensor) -> torch.Tensor:
        """The pool tensor over `prod(shape)` contiguous elements, in the layout's order."""
        if self.order == "blocks":
            return flat.view(self.shape)
        blocks, layers, *page = self.shape
        return flat.view(layers, blocks, *page).transpose(0, 1)

    def layer_view(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """The `kv_cache` of one layer: a view `[num_blocks, vectors, num_kv_heads, block_size, head_dim]` of `pool`."""
        if tuple(pool.shape) != self.shape:
            raise UnsupportedShapeError(f"the pool has shape {tuple(pool.shape)}, the layout says {self.shape}")
        if not 0 <= layer < self.num_layers:
            raise UnsupportedShapeError(
                f"layer {layer} is not in the pool, which holds layers 0..{self.num_layers - 1}"
            )
        return pool[:, layer]


def split_kv(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys and values, each `[num_blocks, num_kv_heads, block_size, head_dim]`, equal strides."""
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise UnsupportedShapeError(
            "kv_cache must have shape [num_blocks, 2, num_kv_heads, block_size, head_dim], "
            f"not {list(kv_cache.shape)}; KVLayout.layer_view gives it"
        )
    return kv_cache[:, 0], kv_cache[:, 1]
