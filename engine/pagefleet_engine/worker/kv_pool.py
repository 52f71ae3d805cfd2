"""The KV pool's memory: zero at first and finite ever after, as attention multiplies what it masks with zero."""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch
from pagefleet_kernels.layout import KVLayout
from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024


def allocate_kv_pool(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `layout.shape`, zero everywhere.

    On a CPU it is anonymous memory of the operating system, which takes a page only when something is written there:
    a large pool costs nothing before it is used.
    """
    if device.type != "cpu":
        return layout.as_pool(torch.zeros(prod(layout.shape), dtype=dtype, device=device))
    num_bytes = layout.num_blocks * layout.bytes_per_block(dtype)
    memory = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages serves as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return layout.as_pool(torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize))
