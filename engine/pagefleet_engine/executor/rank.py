"""One rank of several: its groups and its worker. Importing it imports torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

# torch.distributed has it too, but its types do not say so.
from torch._C._distributed_c10d import FileStore

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.messages import Loaded, RankStart, digest
from pagefleet_engine.executor.rank_loop import PATIENCE_S, BuiltRank
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.group import TorchGroup, nccl_group
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.worker import Worker

_LOAD_PATIENCE = timedelta(hours=1)
"""Ranks that load wait for the slowest disk; one that is gone is seen otherwise."""
_SHM = Path("/dev/shm")  # noqa: S108 - NCCL's place, and only looked at


def build_rank(start: RankStart, times: StartupTimes) -> BuiltRank:
    """Meet the other ranks, and load this one's part of the model.

    Raises:
        ModelLoadError: the weights cannot be loaded.
        ConfigError: the settings do not fit the model or the device, or the ranks cannot meet.
    """
    group, end_loading = _shared(start) if start.group is not None else _nccl(start)
    config = replace(start.config, model=replace(start.config.model, num_threads=start.num_threads))
    folder = Path(start.folder)
    worker = Worker(config, folder, read_arch(folder), times, Communicators(tensor=group), start.pool)
    loaded = Loaded(
        digest(start.config),
        worker.max_in_flight,
        worker.cache.num_blocks,
        worker.cache.block_size,
        worker.cache.bytes_per_block,
        worker.dtype,
        worker.cache_dtype,
        worker.context_length,
        worker.cache.max_model_len,
        times.phases(),
    )
    return BuiltRank(worker, loaded, end_loading)


def _shared(start: RankStart) -> tuple[SharedGroup, Callable[[], None]]:
    assert start.group is not None
    group = SharedGroup(start.group, start.place)

    def end_loading() -> None:
        group.patience_s = PATIENCE_S

    return group, end_loading


def _nccl(start: RankStart) -> tuple[TorchGroup, Callable[[], None]]:
    """Ranks that have a GPU each, which is the only one that this process sees.

    Raises:
        ConfigError: NCCL cannot join them.
    """
    store = FileStore(f"/proc/self/fd/{start.store}", start.size)
    try:
        group, set_timeout = nccl_group(store, start.rank, start.size, _LOAD_PATIENCE)
        group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        line = " ".join(str(error).split())[:300]
        free = shutil.disk_usage(_SHM).free >> 20
        remedy = f"NCCL_DEBUG=INFO says more; /dev/shm has {free} MiB free, and NCCL takes some tens for each rank"
        raise ConfigError(f"NCCL does not join the ranks ({line}): {remedy}") from error
    return group, lambda: set_timeout(timedelta(seconds=PATIENCE_S))
