"""The one door to Triton: `triton`, `tl`, `jit`, and whether kernels can run in this process.

Triton is imported only where it can be used: it is absent on macOS, and a CPU process would pay 0.4 s for nothing.
`TRITON_INTERPRET=1`, set before the first import, runs the same kernels on the CPU, step by step in numpy.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
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

ASYNC_COMPILE: Any = None
if IMPORTED and not INTERPRETED:
    with suppress(ImportError):  # not part of Triton's interface
        ASYNC_COMPILE = importlib.import_module("triton.runtime._async_compile")

# Triton 3.10 changes the default; said here, results do not depend on its version
COMPILE_OPTIONS = {"enable_fp_fusion": True}

__all__ = [
    "ASYNC_COMPILE",
    "COMPILE_OPTIONS",
    "IMPORTED",
    "INTERPRETED",
    "jit",
    "next_power_of_2",
    "tl",
    "triton",
]


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a Triton function; `do_not_specialize` names integers that change from step to step.

    Without it Triton compiles again when such an integer becomes 1 or divisible by 16, in the middle of serving.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        if not IMPORTED:
            return fn
        make = triton.jit if ASYNC_COMPILE is None else _compilable_ahead()
        return make(fn, do_not_specialize=list(do_not_specialize))

    return decorate


@cache
def _compilable_ahead() -> Any:
    """Triton's function, whose launches within `compile_ahead.compile_side_by_side` only compile."""

    class Function(triton.JITFunction):  # type: ignore[misc]
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            ahead = ASYNC_COMPILE.active_mode.get() is not None
            return super().run(*args, grid=grid, warmup=warmup or ahead, **kwargs)

    return Function


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (n >= 1): tiles of Triton have such sides only."""
    return 1 << (n - 1).bit_length()
