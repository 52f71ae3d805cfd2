"""Pages of a pool are there before a step writes, and no more of them than it comes near."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
import torch
from pagefleet_engine.worker.pool_memory import PagesAhead, map_pool
from torch import Tensor

MIB = 1024 * 1024


def resident(pool: Tensor) -> list[bool]:
    """Whether the system has given each MiB of the pool."""
    num_bytes = pool.numel() * pool.itemsize
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(num_bytes), pages) == 0
    each = MIB // mmap.PAGESIZE
    return [all(page & 1 for page in pages[start : start + each]) for start in range(0, len(pages), each)]


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == PagesAhead.THREAD:
            thread.join()


@pytest.fixture
def pool() -> Tensor:
    """Of 64 blocks of one MiB."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("MADV_POPULATE_WRITE came with Linux 5.14")
    return torch.frombuffer(map_pool(64 * MIB), dtype=torch.uint8).view(64, MIB)


def test_pages_are_given_ahead_of_the_highest_block(pool: Tensor) -> None:
    pool[3] = 7
    ahead = PagesAhead(pool, ahead=8 * MIB)
    wait()
    assert all(resident(pool)[:8])
    assert not any(resident(pool)[16:])
    ahead.use([[[1, 2]], [[20], [4]]])
    wait()
    assert all(resident(pool)[:29])
    assert not any(resident(pool)[40:])
    assert pool[3].eq(7).all()
    assert pool.sum(dtype=torch.int64) == 7 * MIB


def test_the_end_of_a_pool_is_given_too(pool: Tensor) -> None:
    ahead = PagesAhead(pool, ahead=8 * MIB)
    wait()
    ahead.use([[[57]]])
    wait()
    assert all(resident(pool))
