"""The one door to Triton: `triton`, `tl`, `jit`, and whether kernels can run in this process.

Triton is imported only where it can be used: it is absent on macOS, and a CPU process would pay 0.4 s for nothing.
`TRITON_INTERPRET=1`, set before the first import, runs the same kernels on the CPU, step by step in numpy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in {"1", "true", "True", "on"}
IMPORTED = importlib.util.find_spec("triton") is not None and (
    INTERPRETED or torch.version.cuda is not None or torch.version.hip is not None
)

if TYPE_CHECKING or IMPORTED:
    import triton
    import triton.language as tl
else:
    triton = tl = None  # kernels are defined but never launched: `dispatch.choose_backend` refuses first

# Triton 3.10 changes the default; said here, results do not depend on its version
COMPILE_OPTIONS = {"enable_fp_fusion": True}

__all__ = ["COMPILE_OPTIONS", "IMPORTED", "INTERPRETED", "jit", "next_power_of_2", "tl", "triton"]


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a Triton function; `do_not_specialize` names integers that change from step to step.

    Without it Triton compiles again when such an integer becomes 1 or divisible by 16, in the middle of serving.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        return triton.jit(fn, do_not_specialize=list(do_not_specialize)) if IMPORTED else fn

    return decorate


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (n >= 1): tiles of Triton have such sides only."""
    return 1 << (n - 1).bit_length()
