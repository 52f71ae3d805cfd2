"""One device with a model on it: loads, sizes the KV cache, warms up, then executes plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pagefleet_engine.config import SHARDED, EngineConfig, default_cache_dir
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.step import ExpertLoad, StepPlan
from pagefleet_engine.cores import kept_on
from pagefleet_engine.errors import ConfigError, StepOutOfMemory
from pagefleet_engine.layers.moe.balanced import Balance
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model, resolve_dtype
from pagefleet_engine.loader.sharded import OwnShard
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.model import Model
from pagefleet_engine.models.parameters import count_parameters
from pagefleet_engine.models.quantization_config import settle_quantization
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.device import (
    DeviceMemory,
    keep_step_memory,
    limit_kernel_caches,
    probe_memory,
    resolve_device,
    set_num_threads,
)
from pagefleet_engine.worker.expert_balance import ExpertBalancer
from pagefleet_engine.worker.kv_pages import make_kv_pages
from pagefleet_engine.worker.memory import (
    KVCacheSize,
    KVNeeds,
    activation_bytes,
    check_free,
    cpu_budget,
    memory_budget,
    size_kv_cache,
)
from pagefleet_engine.worker.model_runner import LaunchedStep, ModelRunner, PassedOn, RunnerLimits
from pagefleet_engine.worker.native import native_library
from pagefleet_engine.worker.out_of_memory import naming_the_remedy
from pagefleet_engine.worker.profile import StepMemory, measure_step_memory
from pagefleet_engine.worker.profile_cache import ProfileCache, device_facts, profile_facts
from pagefleet_engine.worker.rehearsal import rehearse, rehearse_everything, short_step
from pagefleet_engine.worker.runner_factory import Computing, RunnerFactory

_log = logging.getLogger(__name__)
_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Worker:
    """Owns weights, KV pool and runner. Constructed in the thread that executes."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        arch: ModelArch,
        times: StartupTimes | None = None,
        communicators: Communicators | None = None,
        pool_memory: int = -1,
    ) -> None:
        """Load the model in `folder`, whose shape is `arch`; `times` learns how long each phase takes.

        `communicators`: the ranks that this one computes with; None: it is alone. `pool_memory`: descriptor of memory
        for a KV pool on a CPU that another process reads and writes too; -1: none does.

        Raises:
            ModelLoadError: the weights cannot be loaded.
            ConfigError: the settings do not fit the model or the device.
        """
        self._times = times = times or StartupTimes()
        self._communicators = communicators or Communicators()
        self._device = resolve_device(config.model.device)
        if self._device.type == "cuda" and self._communicators.data.size > 1:
            config = _of_copies(config, arch)
        self._config, self._part = config, self._communicators.part
        fp8_cache = config.cache.kv_cache_dtype != "auto"
        arch = replace(arch, quantization=settle_quantization(arch.quantization, config.model.quantization, fp8_cache))
        max_model_len = resolve_max_model_len(config.model.max_model_len, arch.context_length, arch.default_length)
        arch = arch.for_length(max_model_len)
        self.context_length = max_model_len
        """What the model is served for, whatever the KV pool holds."""
        self._arch = arch
        self.kv_groups = group_layers(arch.kept_windows, chunked=arch.chunked)
        """Which layers of the model share a block table."""
        self._layers = arch.stage_layers(config.parallel)[self._part.stage]
        self.max_in_flight = _max_in_flight(config, self._device)
        """Steps that may be launched before the first of them is waited for."""
        self._num_threads = set_num_threads(config.model.num_threads)
        limit_kernel_caches()
        self._native = native_library(self._device, enabled=config.execution.native_kernels)
        compiled_kernels = self._native is not None and not config.execution.compile  # there torch multiplies
        self._dtype = resolve_dtype(config.model.dtype, arch.dtype, self._device, compiled_kernels=compiled_kernels)
        self._kv_dtype = _KV_DTYPES.get(config.cache.kv_cache_dtype, self._dtype)
        self._balance = Balance(config.parallel.num_redundant_experts) if config.parallel.enable_eplb else None
        self._model = self._load(folder)
        self._balancer = self._make_balancer()
        if config.execution.compile:
            self._model = self._compiled(self._model)
        computing = Computing(self._device, self._dtype, self._kv_dtype, self._native)
        own_groups = self.kv_groups.of_layers(self._layers)
        self._factory = RunnerFactory(config, self._model, own_groups, computing, self._communicators)
        self._needs = KVNeeds(self.kv_groups, config.cache.block_size, config.scheduler.max_num_batched_tokens)
        self.cache = self._size_cache(max_model_len)
        """The KV pool; its `max_model_len` is the longest request that this worker takes."""
        self._tell_of_cache()
        self._start(pool_memory)

    def _tell_of_cache(self) -> None:
        _log.info("%s", self.cache.describe())
        if self.cache.max_model_len < self.context_length:
            _log.warning(
                "the KV cache holds %d tokens, the model's context is %d: requests end at the first number",
                self.cache.max_model_len,
                self.context_length,
            )

    def _start(self, pool_memory: int) -> None:
        """Make the pool and the runner, and warm up."""
        self._own_cpu = -1 if self._native is None else self._native.own_cpu()
        times = self._times
        limits = self._factory.limits(self.cache.max_model_len, self.max_in_flight)
        with times.phase("kv_pool"), naming_the_remedy("kv_pool"):
            built = self._factory.make(limits, self.cache.num_blocks, pool_memory)
        with times.phase("kernels"), naming_the_remedy("kv_pool"):
            self._factory.compile_kernels(built, limits)
        self._runner = built.runner
        self.pages = make_kv_pages(built.pool)
        """The KV pool as bytes, for connectors."""
        if built.graphs is not None:
            with times.phase("graphs"), naming_the_remedy("graphs"), torch.inference_mode():
                _log.info("%s", built.graphs.capture(built.state.inputs, count=times.count).describe())
        with times.phase("warm_up"), naming_the_remedy("warm_up"):
            self._warm_up(limits, built.brief_runner)

    @property
    def dtype(self) -> str:
        """Name of the type that the model computes in, e.g. bfloat16."""
        return _name(self._dtype)

    @property
    def cache_dtype(self) -> str:
        """Name of the type of the KV pool."""
        return _name(self._kv_dtype)

    @property
    def idle_seconds(self) -> float:
        """How long the device waited between steps that followed each other."""
        return self._runner.idle_seconds

    @property
    def expert_load(self) -> ExpertLoad | None:
        """What ranks were wanted that have experts, where these move; None: another copy tells it."""
        return None if self._balancer is None else self._balancer.load

    def launch(self, plan: StepPlan) -> LaunchedStep | PassedOn:
        """Start a forward pass and its sampling.

        Raises:
            StepOutOfMemory: the device has no room for this step; others can still run.
        """
        try:
            if self._balancer is not None:
                self._balancer.before_step()
            with kept_on(self._own_cpu):
                return self._runner.launch(plan)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Not before the error is gone: it holds what the step had computed.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepOutOfMemory(f"a step of {plan.num_tokens} tokens in {len(plan.rows)} requests: {reason}")

    def _make_balancer(self) -> ExpertBalancer | None:
        """None where experts stay, or this stage has none."""
        if self._balance is None or not self._balance.layers:
            return None
        parallel, ranks = self._config.parallel, self._communicators
        return ExpertBalancer(
            self._balance.layers,
            ranks.expert_ranks,
            ranks.data,
            window=parallel.eplb_window_size,
            interval=parallel.eplb_step_interval,
        )

    @property
    def steps_together(self) -> bool:
        """Whether what a step takes hangs on the tokens of other copies of the model."""
        return self._communicators.data.size > 1

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int:
        """Have this called as each layer of a step is computed; returns how many there are. 0: nobody can tell, as on a
        GPU, which computes apart from this process, or where steps go together."""
        if self._device.type != "cpu" or not isinstance(self._model, DecoderModel) or self.steps_together:
            return 0
        self._model.on_layer = on_layer
        return len(self._layers)

    def give_up(self, plan: StepPlan) -> None:
        """Let other stages of the pipeline go on after a plan whose launch failed here."""
        self._runner.give_up(plan)

    def _load(self, folder: Path) -> Model:
        """Load this rank's part of the weights.

        Raises:
            ModelLoadError: they cannot be loaded.
        """
        arch, config, count = self._arch, self._config.model, self._times.count
        with self._times.phase("weights"), naming_the_remedy("weights"):
            shard = OwnShard.of(self._config.parallel, self._part) if config.load_format == SHARDED else None
            model = load_model(folder, arch, self._placement(), shard or config.load_format, config.seed, count)
        whole, layers = self._part.num_stages == 1, f"layers {self._layers.start} to {self._layers.stop - 1}"
        where = f"{self._num_threads} CPU threads" if self._device.type == "cpu" else str(self._device)
        own = count_parameters(arch).describe() if whole else layers
        _log.info("loaded %s: %s, %s on %s", arch.model_type, own, _name(self._dtype), where)
        return model

    def _placement(self) -> Placement:
        """Where and how the model's tensors live."""
        traceable = self._config.execution.compile
        use_kernels = self._device.type == "cuda" and not traceable
        return Placement(
            self._dtype,
            self._device,
            use_kernels,
            traceable=traceable,
            tensor=self._communicators.tensor,
            sequence_parallel=self._config.parallel.enable_sequence_parallelism,
            expert_parallel=self._config.parallel.enable_expert_parallel,
            all2all_backend=self._config.parallel.all2all_backend,
            balance=self._balance,
            layers=None if self._part.num_stages == 1 else self._layers,
            machine=self._communicators.everyone,
            data=self._communicators.data,
            native=self._native,
            halves=self._communicators.halves,
        )

    def _compiled(self, model: Model) -> Model:
        """The model with its layers compiled for steps of any size.

        Raises:
            ConfigError: it cannot be compiled here.
        """
        from pagefleet_engine.worker.compile import compile_model  # noqa: PLC0415 imports dynamo: a second or two

        folder = default_cache_dir(self._config.execution.cache_dir) / "compile"
        with self._times.phase("compile"), torch.inference_mode():
            compiled = compile_model(model, folder, self._dtype, self._device)
            seconds = compiled.warm_up(self._config.scheduler.max_num_batched_tokens)
        _log.info("compiled the layers of %s in %.1f s", self._arch.model_type, seconds)
        return compiled

    def _size_cache(self, max_model_len: int) -> KVCacheSize:
        cache = self._config.cache
        bytes_per_block = self._factory.bytes_per_block
        asked_for = self._config.model.max_model_len is not None
        budget = 0
        if cache.num_kv_blocks is None and cache.kv_cache_memory is None:
            budget = self._budget(self._needs.blocks(max_model_len) * bytes_per_block, max_model_len)
        size = size_kv_cache(cache, self._needs, bytes_per_block, max_model_len, budget, exact_len=asked_for)
        check_free(size, self._memory().free)
        return self._common(size)

    def _common(self, size: KVCacheSize) -> KVCacheSize:
        """The pool that every rank has room for; data ranks that step together have the same, and warm up alike."""
        ranks, data = self._communicators.everyone, self._communicators.data
        if ranks.size == data.size == 1:
            return size
        both = torch.tensor([size.num_blocks, size.max_model_len], device=self._device)
        num_blocks, longest = self._least(both).cpu().tolist()
        per_request = self._needs.blocks(longest)
        return replace(size, num_blocks=num_blocks, max_model_len=longest, blocks_per_request=per_request)

    def _least(self, x: Tensor) -> Tensor:
        """Of all ranks, also those of other copies that step together."""
        ranks = self._communicators
        return ranks.data.all_reduce(ranks.everyone.all_reduce(x, "min"), "min")

    def _memory(self) -> DeviceMemory:
        return probe_memory(self._device, self._communicators.everyone)

    def _budget(self, request_bytes: int, max_model_len: int) -> int:
        utilization, scheduler = self._config.cache.gpu_memory_utilization, self._config.scheduler
        moving = 0 if self._balancer is None else self._balancer.needed_bytes
        if self._device.type == "cpu":
            parallel, sizes = self._config.parallel, (scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
            copies = self._communicators.data.size
            activations = activation_bytes(self._model.arch, *sizes, self._dtype.itemsize, copies)
            memory = self._memory().shared_by(parallel.copies_a_node).without(self._kept_by_cores() + moving)
            return cpu_budget(memory, utilization, activations, request_bytes, scheduler.max_num_seqs)
        with self._times.phase("profile"):
            step = self._profile(max_model_len)
        return memory_budget(self._memory(), utilization, step.activations + step.graphs + moving)

    def _kept_by_cores(self) -> int:
        """This rank's part of what connectors take of its machine, which has the cores of all copies, or none."""
        parallel, data = self._config.parallel, self._communicators.data
        copy = data.index if data.size > 1 else parallel.data_parallel_rank or 0
        ranks = parallel.ranks_of(0, copy)
        if self._part.stage * self._part.tensor_size + self._part.tensor not in ranks:
            return 0
        kept = self._config.kv_transfer.host_memory * parallel.data_parallel_size
        return kept // (parallel.copies_a_node * len(ranks))

    def _profile(self, max_model_len: int) -> StepMemory:
        """Measure the largest step, on a CUDA device with a small pool, or recall what an earlier start measured."""
        execution = self._config.execution
        device = device_facts(self._device)
        facts = profile_facts(self._config, self._model.arch, self._dtype, max_model_len, device, self._part)
        cache = ProfileCache(default_cache_dir(execution.cache_dir), facts)
        known = cache.load() if execution.profile_cache else None
        # Ranks measure together: a step takes all of them.
        found = torch.tensor(known is not None, device=self._device, dtype=torch.int32)
        all_know = self._least(found).item()
        if known is not None and all_know:
            return known
        limits = self._factory.limits(max_model_len, self.max_in_flight)
        measured = measure_step_memory(self._factory, limits, self._device, self._times)
        if execution.profile_cache:
            cache.store(measured)
        return measured

    def _warm_up(self, limits: RunnerLimits, brief: ModelRunner) -> None:
        if self._device.type == "cuda":
            cascade = self._config.execution.cascade_attention
            rehearse_everything(brief, limits, self.cache.num_blocks, cascade=cascade)
        else:
            keep_step_memory()  # not before: what loading takes for a while goes back
        row_lens = short_step(limits, self.cache.num_blocks)
        if row_lens and not rehearse(self._runner, row_lens, limits):
            _log.warning(
                "the model's output is not a number: the checkpoint is damaged, or overflows in %s; try --dtype",
                _name(self._dtype),
            )
        if self._balancer is not None:
            self._balancer.start()


def _of_copies(config: EngineConfig, arch: ModelArch) -> EngineConfig:
    """Without graphs, where what copies of the model exchange has other sizes than a step's padding gives it."""
    if config.execution.cuda_graphs == "none" or (
        config.parallel.all2all_backend == "allgather_reducescatter" and not arch.steps_together
    ):
        return config
    _log.info(
        "steps run without CUDA graphs, as how much copies of the model exchange is another number in each step: "
        "--all2all-backend allgather_reducescatter is in graphs"
    )
    return replace(config, execution=replace(config.execution, cuda_graphs="none"))


def _max_in_flight(config: EngineConfig, device: torch.device) -> int:
    """As many as there are stages, each of which computes one; one device is given the next while it computes one."""
    if config.parallel.pipeline_parallel_size > 1:
        return config.parallel.pipeline_parallel_size
    is_async = config.execution.async_scheduling
    return 2 if (device.type == "cuda" if is_async is None else is_async) else 1


def resolve_max_model_len(requested: int | None, context_length: int, default_length: int) -> int:
    """Longest prompt plus output: as asked for, by default all that the model is good at without being told.

    Raises:
        ConfigError: under 2 tokens, or more than the model was made for.
    """
    if requested is None:
        if default_length < context_length:
            _log.info(
                "serving at most %d tokens at once: --max-model-len takes up to %d, at some cost to shorter texts",
                default_length,
                context_length,
            )
        return default_length
    if requested < 2:
        raise ConfigError(f"max_model_len is {requested}: give at least 2, a token of prompt and one of output")
    if requested > context_length:
        raise ConfigError(f"max_model_len is {requested}, the model was made for {context_length}: give at most that")
    return requested


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
