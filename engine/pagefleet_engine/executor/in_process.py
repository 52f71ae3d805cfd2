"""The executor for one device: the worker lives in the engine core's own process and thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagefleet_kv.port import KVPages

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.step import ExpertLoad, StepPlan
from pagefleet_engine.executor.executor import CacheFacts, PendingStep
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.worker import Worker


class InProcessExecutor:
    """Implements `Executor` over one `Worker`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        arch: ModelArch,
        times: StartupTimes | None = None,
        communicators: Communicators | None = None,
    ) -> None:
        """Load the model; takes as long as that takes, and `times` learns what took it.

        Raises:
            ModelLoadError: the weights cannot be loaded.
            ConfigError: the settings do not fit the model or the device.
        """
        self._worker: Worker | None = Worker(config, folder, arch, times, communicators)
        size, groups = self._worker.cache, self._worker.kv_groups
        self._cache = CacheFacts(size.num_blocks, size.block_size, size.bytes_per_block, groups)
        self._max_in_flight = self._worker.max_in_flight
        self.dtype = self._worker.dtype
        """Name of the type that the model computes in."""
        self.cache_dtype = self._worker.cache_dtype
        """Name of the type of the KV pool."""
        self.context_length = self._worker.context_length
        """What the model is served for, whatever the KV pool holds."""
        self.max_model_len = size.max_model_len
        """Longest prompt plus output that fits the model and the KV pool."""

    @property
    def cache(self) -> CacheFacts:
        """The KV pool that was allocated."""
        return self._cache

    @property
    def pages(self) -> KVPages:
        """The worker's KV pool as bytes. Whoever has them must be done with them before `shutdown`."""
        assert self._worker is not None, "pages after shutdown"
        return self._worker.pages

    @property
    def max_in_flight(self) -> int:
        """See Executor."""
        return self._max_in_flight

    @property
    def num_stages(self) -> int:
        """See Executor."""
        return 1

    @property
    def idle_seconds(self) -> float:
        """See Executor."""
        return self._worker.idle_seconds if self._worker is not None else 0.0

    @property
    def expert_load(self) -> ExpertLoad | None:
        """See Executor."""
        return None if self._worker is None else self._worker.expert_load

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Executor."""
        assert self._worker is not None, "launch after shutdown"
        return self._worker.launch(plan)

    @property
    def trace(self) -> None:
        """See Executor."""
        return None

    @property
    def bells(self) -> Sequence[int]:
        """See Executor: whoever asks is this process itself."""
        return ()

    def check(self) -> None:
        """See Executor."""

    def shutdown(self, because: str = "") -> None:
        """Drop weights and KV pool, whatever it is `because` of; may be called twice."""
        self._worker = None
