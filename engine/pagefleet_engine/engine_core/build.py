"""Puts a core together: model folder, executor, KV accounting, scheduler. Importing it imports torch."""

from __future__ import annotations

import logging

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.engine_core.model_folder import resolve_model_folder, served_names
from pagefleet_engine.executor.in_process import InProcessExecutor
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.startup import StartupTimes

_log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig, times: StartupTimes | None = None, cache_events: CacheEvents | None = None
) -> tuple[EngineCore, Ready]:
    """Load the model and make its core.

    Args:
        config: of the engine.
        times: may have counted the imports already.
        cache_events: are told what the prefix cache gains and loses.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: the settings do not fit the model or the device.
    """
    times = times or StartupTimes()
    with times.phase("config"):
        folder = resolve_model_folder(config.model.model)
        arch = read_arch(folder)
    executor = InProcessExecutor(config, folder, arch, times)
    cache = executor.cache
    limits = ModelLimits(executor.max_model_len, arch.vocab_size)
    kv_cache = KVCache(
        cache.num_blocks,
        cache.block_size,
        config.cache.enable_prefix_caching,
        cache.kv_groups,
        config.scheduler.max_num_batched_tokens,
        cache_events,
    )
    scheduler = Scheduler(config.scheduler, kv_cache, limits, cascade=config.execution.cascade_attention)
    name = served_names(config.model.model, config.model.served_model_name)[0]
    ready = Ready(
        limits.max_model_len,
        limits.vocab_size,
        cache.num_blocks,
        cache.block_size,
        executor.dtype,
        times.seconds(),
        name,
    )
    _log.info("%s", times.describe())
    return EngineCore(scheduler, executor, limits, name), ready
