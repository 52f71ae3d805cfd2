"""Which floating type a model computes in."""

from __future__ import annotations

from typing import Any

import torch

from pagefleet_engine.config import DType
from pagefleet_engine.errors import ModelLoadError

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECKPOINT_TYPES = ("float64", *_TYPES)


def resolve_dtype(requested: DType, checkpoint: str, device: torch.device) -> torch.dtype:
    """`requested`, or for `auto` the fastest type that keeps the checkpoint's precision in practice.

    auto on CUDA: the checkpoint's type, bfloat16 for float32 and float64. On a CPU: bfloat16 where it computes in it
    natively (float32 elsewhere), which is also the better reading of a float16 checkpoint there.

    Raises:
        ModelLoadError: the checkpoint names a type that we cannot read.
    """
    if checkpoint not in _CHECKPOINT_TYPES:
        raise ModelLoadError(f"config.json: dtype {checkpoint} is not supported; give {', '.join(_CHECKPOINT_TYPES)}")
    if requested != "auto":
        return _TYPES[requested]
    if device.type != "cpu":
        return torch.float16 if checkpoint == "float16" else torch.bfloat16
    return torch.bfloat16 if cpu_has_native_bfloat16() else torch.float32


def cpu_has_native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX-BF16), and oneDNN may use it:
    `ONEDNN_MAX_CPU_ISA` can forbid that."""
    mkldnn: Any = torch.backends.mkldnn
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
