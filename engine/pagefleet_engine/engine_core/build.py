"""Puts a core together: model folder, executor, KV accounting, scheduler. Importing it imports torch."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pagefleet_kv.connectors import build_connector, check_connectors
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.port import BuiltConnector, EngineIdentity, EngineSide, KVConnector
from pagefleet_protocol.engine_facts import KvTransferFacts

from pagefleet_engine.config import EngineConfig, default_cache_dir
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.core.dual_batch import DualBatch
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.micro_batches import StepStyle
from pagefleet_engine.core.parking import Suppliers
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.engine_core.data_group import DataGroup, data_group
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.kv_shape import LoadedModel, kv_shape
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.engine_core.model_folder import resolve_model_folder, served_names
from pagefleet_engine.engine_core.waves import Waves
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError
from pagefleet_engine.executor.executor import CacheFacts
from pagefleet_engine.executor.in_process import InProcessExecutor
from pagefleet_engine.executor.machines import ThisMachine
from pagefleet_engine.executor.processes import MakeMachines, ProcessExecutor
from pagefleet_engine.executor.rank_pages import kv_shards
from pagefleet_engine.grammars.compiler import GrammarCompiler, GrammarLimits
from pagefleet_engine.grammars.vocabulary import VocabularyFiles
from pagefleet_engine.loader.memory import free_bytes
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.nodes.leader import SeveralMachines
from pagefleet_engine.nodes.model_copy import ModelCopy
from pagefleet_engine.nodes.ray_actors import RayMachines
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.copies import CopyGroups
from pagefleet_engine.ranks.network import named_address
from pagefleet_engine.ranks.parallelism import WHOLE, Parallelism
from pagefleet_engine.ranks.together import TogetherHandles, patience_s
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.text.model_files import has_tokenizer
from pagefleet_engine.worker.logits_processors import load_processor_kinds

_log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    times: StartupTimes | None = None,
    cache_events: CacheEvents | None = None,
    identity: EngineIdentity | None = None,
    together: TogetherHandles | None = None,
    data_rank: int = 0,
) -> tuple[EngineCore, Ready]:
    """Load the model and make its core.

    Args:
        config: of the engine.
        times: may have counted the imports already.
        cache_events: are told what the prefix cache gains and loses.
        identity: of this start; by default it is of no fleet.
        together: what the data ranks share, if there are several.
        data_rank: of this core.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: the settings do not fit the model or the device.
    """
    times, identity = times or StartupTimes(), identity or EngineIdentity()
    with times.phase("config"):
        _check_connectors(config, identity)
        folder = resolve_model_folder(config.model.model)
        arch = read_arch(folder, config.model.hf_overrides)
        config.parallel.check_experts(0 if arch.experts is None else arch.experts.routing.num_experts)
        processors = load_processor_kinds(config.execution.processor_names)
        group = data_group(config, arch, together, data_rank)
    executor, waves = _load(_of_copy(config, data_rank, group), folder, arch, times, identity, group)
    cache = executor.cache
    limits = ModelLimits(executor.max_model_len, arch.vocab_size, config.model.max_logprobs)
    kv_cache = _kv_cache(config, cache, cache_events)
    name = served_names(config.model.model, config.model.served_model_name)[0]
    model = LoadedModel(folder, arch, name, executor.dtype, executor.cache_dtype, executor.context_length)
    connector, kv_transfer = _connect(config, executor, model, identity, group)
    grammars = _grammars(config, folder, arch)
    scheduler = Scheduler(
        config.scheduler,
        kv_cache,
        limits,
        style=StepStyle(config.execution.cascade_attention, config.parallel.pipeline_parallel_size),
        suppliers=Suppliers(connector, grammars),
    )
    ready = Ready(
        limits.max_model_len,
        limits.vocab_size,
        cache.num_blocks,
        cache.block_size,
        executor.dtype,
        times.seconds(),
        name,
        kv_transfer,
    )
    _log.info("%s", times.describe())
    core = EngineCore(scheduler, executor, limits, name, grammars, processors)
    if waves is not None:
        core.step_together(waves, _dual_batch(config.parallel))
    return core, ready


def _dual_batch(parallel: Parallelism) -> DualBatch | None:
    if not parallel.enable_dbo:
        return None
    return DualBatch(parallel.dbo_decode_token_threshold, parallel.dbo_prefill_token_threshold)


def _kv_cache(config: EngineConfig, cache: CacheFacts, events: CacheEvents | None) -> KVCache:
    return KVCache(
        cache.num_blocks,
        cache.block_size,
        config.cache.enable_prefix_caching,
        cache.kv_groups,
        config.scheduler.max_num_batched_tokens,
        events,
    )


def _of_copy(config: EngineConfig, data_rank: int, group: DataGroup | None) -> EngineConfig:
    """What the ranks of one of several copies are told, so that they can say of which they are; those that step
    together know."""
    parallel = config.parallel
    if parallel.is_alone or parallel.data_ranks == 1 or group is not None:
        return config
    return replace(config, parallel=replace(parallel, data_parallel_rank=data_rank))


def _load(
    config: EngineConfig,
    folder: Path,
    arch: ModelArch,
    times: StartupTimes,
    identity: EngineIdentity,
    group: DataGroup | None,
) -> tuple[InProcessExecutor | ProcessExecutor, Waves | None]:
    """Load the model, and join the data ranks that step together, if they do."""
    parallel = config.parallel
    if config.has_processes:
        machines = _machines(config, folder, identity, group)
        executor = ProcessExecutor(config, folder, arch, times, machines=machines)
        if group is None:
            return executor, None
        executor.step_together(group.turns)
        return executor, group.waves(parallel)
    if group is None:
        return InProcessExecutor(config, folder, arch, times), None
    copies = CopyGroups(group.handles.of_rank(group.copy, 0), WHOLE, on_gpu=group.on_gpu)
    ranks = Communicators(data=copies.data, halves=copies.halves)
    alone = InProcessExecutor(config, folder, arch, times, ranks)
    copies.end_loading(patience_s(parallel))
    return alone, group.waves(parallel)


def _machines(config: EngineConfig, folder: Path, identity: EngineIdentity, group: DataGroup | None) -> MakeMachines:
    """Where the ranks of a copy of the model are."""
    parallel = config.parallel
    number = parallel.data_parallel_rank or 0 if group is None else group.copy
    of = ModelCopy(number, None if group is None else group.handles.meeting)
    if parallel.distributed_executor_backend == "ray":
        return partial(RayMachines, folder=folder, of=of)
    if parallel.nnodes > 1 and (number == 0 or parallel.nodes_of(number).stop > 1):
        return partial(SeveralMachines, folder=folder, fleet_key_file=identity.fleet_key_file, of=of)
    shares = [] if group is None else [group.handles.of_rank(number, rank) for rank in range(parallel.world_size)]
    if parallel.nnodes == 1:
        return partial(ThisMachine, shares=shares)
    address = named_address(str(parallel.master_addr), parallel.master_port)
    return partial(ThisMachine, shares=shares, rendezvous=of.rendezvous(), address=address)


def _grammars(config: EngineConfig, folder: Path, arch: ModelArch) -> GrammarCompiler | None:
    """What compiles forms; None where no tokenizer says what tokens mean. It starts nothing before the first form."""
    tokenizer = Path(config.model.tokenizer) if config.model.tokenizer else folder
    if not has_tokenizer(tokenizer):
        return None
    settings = config.structured_outputs
    return GrammarCompiler(
        VocabularyFiles(str(tokenizer), str(folder), arch.vocab_size, config.model.hf_overrides),
        settings.structured_outputs_backend,
        default_cache_dir(config.execution.cache_dir) / "grammars",
        GrammarLimits(
            seconds=settings.structured_outputs_timeout,
            memory=settings.structured_outputs_memory,
            cached_bytes=settings.structured_outputs_cache,
        ),
    )


def _check_connectors(config: EngineConfig, identity: EngineIdentity) -> None:
    """Refuse connectors that can be seen to be impossible before the model is looked at.

    Raises:
        ConfigError: one cannot be, or there is no prefix cache for what they bring.
    """
    if config.kv_transfer.connectors and not config.cache.enable_prefix_caching:
        raise ConfigError("kv_connector needs the prefix cache: leave enable_prefix_caching on, or kv_connector out")
    try:
        check_connectors(config.kv_transfer, identity)
    except KVConfigError as error:
        raise ConfigError(str(error)) from error


def _built(config: EngineConfig, side: EngineSide, executor: InProcessExecutor | ProcessExecutor) -> BuiltConnector:
    """Make the connector. What is asked of ranks for it may find one gone, or that hangs: then none is left.

    Raises:
        ModelLoadError: a rank is gone.
        ConfigError: the connector cannot be.
    """
    with contextlib.ExitStack() as on_failure:
        try:
            try:
                built = build_connector(config.kv_transfer, side)
                on_failure.callback(built.connector.close)
            finally:
                executor.check()
        except EngineDead as error:
            raise ModelLoadError(str(error)) from error
        except KVConfigError as error:
            executor.shutdown(because=str(error))
            raise ConfigError(str(error)) from error
        on_failure.pop_all()
    return built


def _connect(
    config: EngineConfig,
    executor: InProcessExecutor | ProcessExecutor,
    model: LoadedModel,
    identity: EngineIdentity,
    group: DataGroup | None,
) -> tuple[KVConnector | None, KvTransferFacts | None]:
    """Make the connector, and what routers are told of it.

    Raises:
        ConfigError: it cannot be made.
    """
    if not config.kv_transfer.connectors:
        return None, None
    cache, shape = executor.cache, kv_shape(config, model, executor.cache.kv_groups)
    free = free_bytes(torch.device("cpu"))
    shards = kv_shards(model.arch, config.parallel, cache.kv_groups)
    with_copies = group is not None
    side = EngineSide(identity, shape, executor.pages, cache.num_blocks, free, shards, with_copies)
    built = _built(config, side, executor)
    if built.port is None:
        return built.connector, None
    num_full = max(1, shape.windows.count(None))  # a window's share of a long prompt is little
    bytes_per_token = num_full * side.pages.bytes_per_block // cache.block_size
    facts = KvTransferFacts(
        role=config.kv_transfer.kv_role,
        port=built.port,
        compatibility=shape.compatibility.hex(),
        bytes_per_token=bytes_per_token,
    )
    return built.connector, facts
