"""Ranks as threads of one process, which meet over gloo or in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from pagefleet_engine.ranks.group import RankGroup, gloo_group
from pagefleet_engine.ranks.shared_handles import make_shared_group
from pagefleet_engine.ranks.shared_memory import SharedGroup
from torch._C._distributed_c10d import HashStore

_T = TypeVar("_T")


def in_memory(size: int, work: Callable[[RankGroup], _T]) -> list[_T]:
    """As `on_ranks`, through shared memory."""
    handles = make_shared_group(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda index: work(SharedGroup(handles, index)), range(size)))
    finally:
        for fd in handles.fds:
            os.close(fd)


def on_ranks(size: int, work: Callable[[RankGroup], _T]) -> list[_T]:
    """What `work` gives on each of so many ranks."""
    store = HashStore()

    def rank(index: int) -> _T:
        return work(gloo_group(store, index, size, timedelta(seconds=60))[0])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))
