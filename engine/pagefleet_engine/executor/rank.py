"""One rank of several: its groups and its worker. Importing it imports torch."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.asked_pool import CopyServer
from pagefleet_engine.executor.messages import Loaded, RankStart, digest
from pagefleet_engine.executor.rank_loop import PATIENCE_S, BuiltRank
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.group import RankGroup, gloo_group, nccl_group
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.store import RankStore
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.device import resolve_device
from pagefleet_engine.worker.worker import Worker

_LOAD_PATIENCE = timedelta(hours=1)
"""Ranks that load wait for the slowest disk; one that is gone is seen otherwise."""
_Joined = tuple[RankGroup, Callable[[], None]]
"""A group, and what ends the patience of loading."""
_SHM = Path("/dev/shm")  # noqa: S108 - NCCL's place, and only looked at


def build_rank(start: RankStart, times: StartupTimes) -> BuiltRank:
    """Meet the other ranks, and load this one's part of the model.

    Raises:
        ModelLoadError: the weights cannot be loaded.
        ConfigError: the settings do not fit the model or the device, or the ranks cannot meet.
    """
    group, end_loading = _tensor_ranks(start)
    config = replace(start.config, model=replace(start.config.model, num_threads=start.num_threads))
    folder = Path(start.folder)
    worker = Worker(config, folder, read_arch(folder), times, Communicators(tensor=group), start.pool)
    if start.copies is not None:
        CopyServer(worker.pages, start.pool, start.copies, pinned=True)
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


def _tensor_ranks(start: RankStart) -> _Joined:
    if start.group is not None:
        return _shared(start)
    return _nccl(start) if resolve_device(start.config.model.device).type == "cuda" else _over_network(start)


def _shared(start: RankStart) -> _Joined:
    assert start.group is not None
    group = SharedGroup(start.group, start.place)

    def end_loading() -> None:
        group.patience_s = PATIENCE_S

    return group, end_loading


def _over_network(start: RankStart) -> _Joined:
    """Ranks on CPUs of several machines.

    Raises:
        ConfigError: they do not reach each other.
    """
    try:
        group, set_timeout = gloo_group(_store(start), start.rank, start.size, _LOAD_PATIENCE, start.address)
    except RuntimeError as error:
        raise ConfigError(
            f"gloo does not join the ranks ({_line(error)}): let nodes reach each other on any port, or name the "
            "network interface by GLOO_SOCKET_IFNAME"
        ) from error
    return group, lambda: set_timeout(timedelta(seconds=PATIENCE_S))


def _nccl(start: RankStart) -> _Joined:
    """Ranks that have a GPU each, which is the only one that this process sees.

    Raises:
        ConfigError: NCCL cannot join them.
    """
    try:
        group, set_timeout = nccl_group(_store(start), start.rank, start.size, _LOAD_PATIENCE)
        group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        free = shutil.disk_usage(_SHM).free >> 20
        remedy = f"NCCL_DEBUG=INFO says more; /dev/shm has {free} MiB free, and NCCL takes some tens for each rank"
        raise ConfigError(f"NCCL does not join the ranks ({_line(error)}): {remedy}") from error
    return group, lambda: set_timeout(timedelta(seconds=PATIENCE_S))


def _store(start: RankStart) -> RankStore:
    return RankStore(socket.socket(fileno=start.store), _LOAD_PATIENCE)


def _line(error: RuntimeError) -> str:
    return " ".join(str(error).split())[:300]
