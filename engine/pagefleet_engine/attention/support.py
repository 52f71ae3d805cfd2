"""Which KV pools the backends can attend over; the rest is refused before a request is taken."""

from __future__ import annotations

import torch
from pagefleet_kernels.attention_launch import KV_DTYPES
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.tuning import MAX_HEAD_DIM
from torch import Tensor

from pagefleet_engine.errors import ConfigError

OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies, which the kernels are built on."""


def check_pool(pool: Tensor, layout: KVLayout) -> None:
    """Raise ConfigError unless the pool's dtype is supported and its shape is the layout's."""
    if pool.dtype not in KV_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
        raise ConfigError(f"a KV cache in {str(pool.dtype).removeprefix('torch.')} is not supported: choose {names}")
    if tuple(pool.shape) != layout.shape:
        raise ConfigError(f"the KV pool has shape {tuple(pool.shape)}, its layout says {layout.shape}")


def check_kernels(pool: Tensor, layout: KVLayout) -> None:
    """Raise ConfigError unless the Triton kernels take such heads, on a GPU of the pool's generation."""
    check_pool(pool, layout)
    if layout.vectors == 2 and layout.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"attention heads of {layout.head_dim} are not supported on a GPU: sizes up to {MAX_HEAD_DIM} are; "
            "run this model with --device cpu"
        )
    if pool.device.type == "cuda" and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(pool.device)
        if capability < OLDEST_CAPABILITY:
            raise ConfigError(
                f"{torch.cuda.get_device_name(pool.device)} has compute capability {capability[0]}.{capability[1]}: "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or later is needed; use --device cpu"
            )
