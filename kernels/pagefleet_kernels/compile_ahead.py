"""Compiling kernels side by side before the first of them is needed, where Triton can do so."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from pagefleet_kernels import _triton


@contextmanager
def compile_side_by_side(num_threads: int) -> Iterator[bool]:
    """Kernels that are launched within do not run: what is missing of them is compiled, in threads, until the end.

    Gives False where that cannot be, and launches would run: launch nothing then. What does not compile is told by the
    launch that needs it. What kernels would have written holds anything: let no index come of it.
    """
    if _triton.ASYNC_COMPILE is None:
        yield False
        return
    mode = _triton.ASYNC_COMPILE.AsyncCompileMode  # errors must not end it: Triton 3.6 would stay within it
    with ThreadPoolExecutor(num_threads, "compile") as pool, mode(pool, ignore_errors=True):
        yield True
