"""Data ranks: what each gets of the machine, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import msgspec
from pagefleet_kv.config import KvEventsConfig, KVTransferConfig
from pagefleet_protocol.load_progress import LoadPhase, LoadProgress

from pagefleet_engine.client.balance import RankRoom
from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.client.core_process import CoreProcess, Surroundings
from pagefleet_engine.config import EngineConfig, ModelConfig, cpu_threads
from pagefleet_engine.cores import usable_cores
from pagefleet_engine.engine_core.messages import CoreStats, Ready
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.gpu_size import visible_gpus
from pagefleet_engine.rank_settings import events_port, transfer_of_rank
from pagefleet_engine.ranks.together import make_together

RANKS_PER_CORE = 8
"""More than anybody has a use for, and fewer than a machine comes to a standstill under."""

_PHASES: tuple[LoadPhase, ...] = get_args(LoadPhase)


def core_processes(
    config: EngineConfig,
    command: Sequence[str] = CORE_COMMAND,
    around: Surroundings | None = None,
    ahead: ChildProcess | None = None,
) -> list[CoreProcess]:
    """Return the processes of an engine's cores, one for each data rank; `CoreProcess` says what the arguments are.

    Raises:
        ConfigError: there are not as many GPUs as they take.
    """
    configs, all_around = rank_configs(config), around or Surroundings()
    if len(configs) == 1:
        rank = config.parallel.data_parallel_rank
        named = all_around if rank is None else replace(all_around, name=f"engine core {rank}")
        return [CoreProcess(configs[0], command, named, ahead)]
    devices = rank_devices(config, visible_gpus())
    try:
        together = make_together(config.parallel)
    except OSError as error:
        raise ConfigError(
            f"the data ranks' memory cannot be made ({error}): raise the limits of processes and open files"
        ) from error
    return [
        CoreProcess(
            own,
            command,
            replace(
                all_around,
                kv_events=_events_of_rank(all_around.kv_events, rank),
                name=f"engine core {rank}",
                devices=devices[rank],
                data_rank=rank,
                together=together,
            ),
        )
        for rank, own in enumerate(configs)
    ]


def _events_of_rank(config: KvEventsConfig | None, rank: int) -> KvEventsConfig | None:
    return config and replace(config, port=events_port(config.port, rank))


def rank_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the configuration of each rank here: it gets its share of what is given for the engine as a whole."""
    count, alone = config.parallel.data_parallel_size, config.parallel.data_parallel_rank
    if count == 1:
        return [config]
    return [
        replace(
            config,
            model=_share_of_model(config, rank),
            kv_transfer=_share_of_transfer(config.kv_transfer, rank, count, has_port=alone is None),
        )
        for rank in (range(count) if alone is None else [alone])
    ]


def _share_of_model(config: EngineConfig, rank: int) -> ModelConfig:
    """Each rank draws other numbers for requests without a seed; random weights, which are of the seed, stay alike."""
    model, parallel = config.model, config.parallel
    seed = model.seed if model.load_format == "dummy" else model.seed + (rank << 32)
    if parallel.nnodes > 1 and model.num_threads is None:
        return replace(model, seed=seed)  # each machine has cores of its own
    threads = max(1, cpu_threads(model.num_threads) // parallel.copies_a_node)
    return replace(model, num_threads=threads, seed=seed)


def _share_of_transfer(config: KVTransferConfig, rank: int, count: int, *, has_port: bool) -> KVTransferConfig:
    """A rank alone was given its own ports."""
    config = transfer_of_rank(config, rank) if has_port else config
    if "offload" not in config.connectors:
        return config
    folder = config.kv_offload_dir
    return replace(
        config,
        kv_offload_memory=max(1, config.kv_offload_memory // count),
        kv_offload_disk=config.kv_offload_disk // count,
        kv_offload_dir=None if folder is None else str(Path(folder).expanduser() / f"rank-{rank}"),
    )


def rank_devices(config: EngineConfig, gpus: Sequence[str]) -> list[Mapping[str, str]]:
    """Return the variables by which each of several ranks sees no GPUs but its own; over several machines who starts
    ranks there knows.

    Args:
        config: of the engine.
        gpus: that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.

    Raises:
        ConfigError: they are not enough, or there is no GPU and the cores are by far not enough.
    """
    parallel = config.parallel
    count, here = parallel.data_parallel_size, len(parallel.copies_on(0))
    each = len(parallel.ranks_of(0))
    if config.model.device == "cpu" or not gpus:
        if here * each > RANKS_PER_CORE * (cores := usable_cores()):
            raise ConfigError(
                f"data_parallel_size {count} takes {here * each} processes that compute, and {cores} cores can be "
                f"used: give {max(1, RANKS_PER_CORE * cores // each) * parallel.nnodes} at most"
            )
        return [{}] * count
    if len(gpus) < here * each:
        raise ConfigError(
            f"data_parallel_size {count} takes {here * each} GPUs, and {len(gpus)} can be seen: lower it, or let "
            "CUDA_VISIBLE_DEVICES name more"
        )
    if parallel.nnodes > 1:
        return [{}] * count
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * each : (rank + 1) * each])} for rank in range(count)]


def rank_rooms(config: EngineConfig, ranks: Sequence[Ready]) -> list[RankRoom]:
    """Return what each rank holds at once."""
    limits = config.scheduler
    return [RankRoom(limits.max_num_seqs, one.num_blocks * one.block_size, limits.max_num_queued_reqs) for one in ranks]


def furthest_behind(ranks: Iterable[LoadProgress]) -> LoadProgress:
    """Return the progress that all wait for."""
    return min(ranks, key=lambda one: (_PHASES.index(one.phase), one.share or 0.0))


def joint_ready(ranks: Sequence[Ready]) -> Ready:
    """Return what the ranks are as one engine: blocks are added up, a request has to fit the smallest of them."""
    phases = {phase: max(one.startup_seconds.get(phase, 0.0) for one in ranks) for phase in ranks[0].startup_seconds}
    return msgspec.structs.replace(
        ranks[0],
        max_model_len=min(one.max_model_len for one in ranks),
        num_blocks=sum(one.num_blocks for one in ranks),
        startup_seconds=phases,
    )


def joint_stats(ranks: Sequence[CoreStats | None], num_blocks: Sequence[int]) -> CoreStats | None:
    """Return the ranks' figures as those of one engine: sums, and the share of all blocks that is in use.

    Args:
        ranks: figures of each; None: it has none yet, which counts as zeros.
        num_blocks: that each has.
    """
    told = [one for one in ranks if one is not None]
    if len(ranks) == 1 or not told:
        return ranks[0]
    used = sum(one.kv_usage * blocks for one, blocks in zip(ranks, num_blocks, strict=True) if one is not None)
    sums = {name: _sum([getattr(one, name) for one in told]) for name in CoreStats.__struct_fields__}
    return CoreStats(**sums | {"kv_usage": used / sum(num_blocks)})


def _sum(values: Sequence[Any]) -> Any:
    """Add up numbers, or mappings and sequences of them entry by entry."""
    first = values[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: sum(value.get(name, 0) for value in values) for name in names}
    if isinstance(first, Sequence):
        return [sum(entries) for entries in zip_longest(*values, fillvalue=0)]
    return sum(values)
