"""Makes runners over one loaded model: for the pool that serves, and before that for a small one to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from pagefleet_kernels.dispatch import architecture
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.library import Library
from pagefleet_protocol.model_config.kv_spec import KVSpec
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend
from pagefleet_engine.attention.flash_backend import FLASH_IS_FASTER, FlashBackend
from pagefleet_engine.attention.native_backend import NativeBackend, takes_pool
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.config import EngineConfig, default_cache_dir
from pagefleet_engine.core.kv_groups import KVGroups
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.models.model import Model
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.stages import Stage
from pagefleet_engine.worker.device import keep_kernels
from pagefleet_engine.worker.forward import EagerForward, Forward
from pagefleet_engine.worker.graphs.capture import CudaGraphs
from pagefleet_engine.worker.graphs.dispatcher import GraphDispatcher, coarser, resolve_sizes
from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode, resolve_graph_mode
from pagefleet_engine.worker.halves import HalvedForward
from pagefleet_engine.worker.logits_processors import make_processors
from pagefleet_engine.worker.model_runner import ModelRunner, RequestState, RunnerLimits
from pagefleet_engine.worker.pool_memory import map_pool
from pagefleet_engine.worker.recorded_forward import RecordedForward
from pagefleet_engine.worker.rehearsal import compile_ahead


def kv_layout(kv: KVSpec, num_blocks: int, groups: KVGroups, block_size: int) -> KVLayout:
    """The pool of a worker whose layers keep this of a token."""
    return KVLayout(num_blocks, groups.layers_per_block, kv.heads, block_size, kv.dim, vectors=kv.vectors)


def allocate_kv_pool(
    layout: KVLayout, dtype: torch.dtype, device: torch.device, shared: int = -1, *, held: bool = False
) -> Tensor:
    """A tensor of `layout.shape`, zero everywhere: attention multiplies what it masks with zero, so it must be finite.

    Args:
        layout: of the pool.
        dtype: of its numbers.
        device: that it is on.
        shared: see `map_pool`.
        held: a CPU's pool takes its memory now; else it costs nothing before it is used.
    """
    if device.type != "cpu":
        return layout.as_pool(torch.zeros(prod(layout.shape), dtype=dtype, device=device))
    num_bytes = layout.num_blocks * layout.bytes_per_block(dtype)
    memory = map_pool(num_bytes, shared)
    pool = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize)
    return layout.as_pool(pool.zero_() if held else pool)


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner, and its parts that start-up works with."""

    runner: ModelRunner
    brief_runner: ModelRunner
    """The same for steps whose results nobody needs: of the model's excerpt, without graphs."""
    state: RequestState
    pool: Tensor
    """Its K/V."""
    graphs: GraphForward | None
    """Where steps are to be replayed as graphs; nothing is captured yet."""
    excerpt: EagerForward
    """Of the model's excerpt, over the same pages."""


@dataclass(frozen=True, slots=True)
class Computing:
    """What a model is computed on."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of its pool."""
    native: Library | None
    """The compiled kernels of a CPU."""


class RunnerFactory:
    """One model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        groups: KVGroups,
        computing: Computing,
        communicators: Communicators,
    ) -> None:
        """`groups` place the model's own layers; `communicators`: of its rank.

        Raises ConfigError for graphs that the device does not have, sizes or logits processors that cannot be."""
        self._config = config
        self._model, self._excerpt = model, model.excerpt()
        self._groups = groups
        self._dtype, self._kv_dtype = computing.dtype, computing.kv_dtype
        self._links, self._halves = communicators.links, communicators.halves
        self._native = computing.native
        self._device = device = computing.device
        self._is_compiled = device.type != "cuda"
        if device.type == "cuda":
            keep_kernels(default_cache_dir(config.execution.cache_dir) / "kernels")
        self._graph_mode = resolve_graph_mode(config.execution.cuda_graphs, device.type)
        # What torch.compile has fused is no operation that could be noted.
        may_record = config.execution.cuda_graphs == "auto" and not config.execution.compile
        self._records = may_record and communicators.is_alone
        self._processors = make_processors(config.execution.processor_names, model.arch.vocab_size, device)
        scheduler, setting = config.scheduler, config.execution.cuda_graph_sizes
        self._graph_sizes = resolve_sizes(setting, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._mixed_graph_sizes = self._graph_sizes if setting is not None else coarser(self._graph_sizes)

    @property
    def bytes_per_block(self) -> int:
        """Of the KV pool, over the layers that share a block."""
        return self._layout(1).bytes_per_block(self._kv_dtype)

    def limits(self, max_model_len: int, max_in_flight: int) -> RunnerLimits:
        """Sizes for requests of up to `max_model_len` tokens."""
        scheduler = self._config.scheduler
        return RunnerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=self._config.cache.block_size,
            vocab_size=self._model.arch.vocab_size,
            num_kv_groups=len(self._groups),
            max_in_flight=max_in_flight,
        )

    def make(self, limits: RunnerLimits, num_blocks: int, shared: int = -1) -> BuiltRunner:
        """A runner with a pool of its own; `shared`: descriptor of the memory that it lies in on a CPU, for others."""
        layout = self._layout(num_blocks)
        # Memory of a size that was asked for is missed now if it is missing: no step waits for the system to find it.
        held = self._config.cache.kv_cache_memory is not None
        pool = allocate_kv_pool(layout, self._kv_dtype, self._device, shared, held=held)
        backend = self._backend(pool, layout)
        seed, stage = self._config.model.seed, self._stage(limits)
        # A part of the vocabulary is drawn from by torch: so is the whole of it then, or a row's token would hang on
        # whether a neighbour needs the whole.
        sampling = self._native if self._model.divided_head is None else None
        state = RequestState(limits, seed, self._device, sampling, self._processors, stage)
        eager = EagerForward(self._model, backend)
        forward: Forward = eager
        graphs = None
        if self._graph_mode is not GraphMode.NONE:
            dispatcher = GraphDispatcher(
                self._graph_mode, self._graph_sizes, limits.max_num_seqs, self._mixed_graph_sizes
            )
            device_graphs = CudaGraphs(self._device)
            forward = graphs = GraphForward(self._model, backend, dispatcher, device_graphs, self._excerpt)
        elif isinstance(backend, NativeBackend) and self._records:
            forward = RecordedForward(self._model, backend)
        if self._halves is not None:
            forward = HalvedForward(forward, eager, self._halves.turns)
        head = self._model.divided_head
        brief = EagerForward(self._excerpt, backend)
        runner = ModelRunner(self._model, forward, pool, state, limits.vocab_size, head)
        brief_runner = ModelRunner(self._model, brief, pool, state, limits.vocab_size, head)
        return BuiltRunner(runner, brief_runner, state, pool, graphs, brief)

    def compile_kernels(self, built: BuiltRunner, limits: RunnerLimits) -> None:
        """Have what the steps of a runner of `make` launch; others that it makes launch the same."""
        if not self._is_compiled:
            cascade = self._config.execution.cascade_attention
            compile_ahead(built.excerpt, built.state.inputs, limits, cascade=cascade)
            self._is_compiled = True

    def _stage(self, limits: RunnerLimits) -> Stage:
        links = self._links
        if links.inlet is None and links.outlet is None:
            return Stage()
        shape = (limits.max_num_batched_tokens, self._model.arch.passed_width)
        return Stage(links, torch.zeros(shape, dtype=self._dtype, device=self._device))

    def _backend(self, pool: Tensor, layout: KVLayout) -> AttentionBackend:
        setting = self._config.execution.attention_backend
        if self._device.type == "cpu":
            if setting != "auto":
                raise ConfigError(
                    f"--attention-backend {setting} needs a GPU, and this engine runs on a CPU: leave it out"
                )
            if self._native is not None and takes_pool(layout, pool.dtype, self._dtype):
                return NativeBackend(pool, layout, self._groups, self._native)
            return TorchBackend(pool, layout, self._groups)
        if setting == "flash" or (setting == "auto" and architecture(self._device) in FLASH_IS_FASTER):
            return FlashBackend(pool, layout, self._groups, or_triton=setting == "auto")
        return TritonBackend(pool, layout, self._groups)

    def _layout(self, num_blocks: int) -> KVLayout:
        return kv_layout(self._model.arch.kv, num_blocks, self._groups, self._config.cache.block_size)
