"""Frozen configuration of one engine, grouped by concern. Field docstrings become the help of `pagefleet serve`.

Nothing here is written after construction: what depends on the model or the device is worked out once, by the worker
and the engine core, into values of their own.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pagefleet_kv.config import KvEventsConfig, KVTransferConfig, TwoPorts
from pagefleet_protocol.cors import CorsError, allow
from pagefleet_protocol.settings.fields import (
    Between,
    Bytes,
    Count,
    HostName,
    JsonObject,
    Port,
    Seconds,
    Share,
    Shown,
    Spellings,
    Words,
    check_limits,
)
from pagefleet_protocol.trace_collector import TracesError, traces_url

from pagefleet_engine.cores import usable_cores
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.parallelism import Parallelism

DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Spellings(
        {
            "half": "float16",
            "float": "float32",
            **{f"torch.{name}": name for name in ("float16", "bfloat16", "float32")},
        }
    ),
]
STREAMED = "runai_streamer"
SHARDED = "sharded_state"
LoadFormat = Literal["auto", "safetensors", "dummy", "runai_streamer", "sharded_state"]
Policy = Literal["fcfs", "priority"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["fp8", "int8"]
KVCacheDType = Annotated[Literal["auto", "fp8", "fp8_e5m2"], Spellings({"fp8_e4m3": "fp8"})]
MetricsNames = Literal["pagefleet", "vllm"]
StructuredOutputsBackend = Literal["auto", "xgrammar", "guidance"]
AttentionBackendName = Annotated[
    Literal["auto", "triton", "flash"], Spellings({"TRITON_ATTN": "triton", "FLASH_ATTN": "flash"})
]
CudaGraphs = Literal["auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]

# The upper limits are far beyond what pays; buffers are made for this many.
_Seats = Annotated[int, Between(1, 2**16)]
MAX_STEP_TOKENS = 2**20
_StepTokens = Annotated[int, Between(1, MAX_STEP_TOKENS)]
_Size = Annotated[Bytes, Between(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to load, and how."""

    model: str
    """organization/name of the Hugging Face Hub, a folder in its layout, s3://bucket/path, gs://bucket/path,
    https://host/folder, oci://registry/repository:tag, modelscope://organization/name, or builtin://tiny."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub; default: main, at the commit that was downloaded first."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer, as of a model; default: the model's."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer; default: the model's where tokenizer is not given, else main."""
    hf_overrides: Annotated[str, JsonObject()] | None = None
    """What the model's config.json shall say instead, as a JSON object; objects in it are merged."""
    download_dir: str | None = None
    """Folder for models that are downloaded; default: the cache that the hub's tools share (HF_HUB_CACHE)."""
    hf_token: str | None = field(default=None, repr=False)
    """Token of the hub; default: HF_TOKEN, which other users of this machine cannot read in its list of processes."""
    served_model_name: Annotated[str, Words()] | None = None
    """Names that clients may use, the first being the engine's own: NAME ALIAS or NAME,ALIAS; default: the folder's
    name, or that on the hub."""
    dtype: DType = "auto"
    """auto: on a GPU the checkpoint's type; on a CPU bfloat16, or float32 where that is slow (no compiled kernels)."""
    max_logprobs: Annotated[int, Between(-1)] = 20
    """Most alternatives per token that a request may ask for; -1: all of the vocabulary, which it asks for by -1."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; default: what the model was made for (LongRoPE: trained for first)."""
    generation_config: str = "auto"
    """auto: requests that do not say how to sample get what the model's generation_config.json recommends; a folder:
    what the one in there does; vllm, none: OpenAI's defaults."""
    load_format: LoadFormat = "auto"
    """dummy: random weights, for measuring without a checkpoint. runai_streamer: weights of a store are read from there
    into place, with no copy on disk; by pagefleet's own code. sharded_state: a folder of LLM(...).save_sharded_state(),
    of which each rank reads its own files alone."""
    seed: int = 0
    """Of dummy weights, and of sampling without a seed of its own."""
    device: Device = "auto"
    """auto: CUDA where there is a GPU, else the CPU."""
    quantization: Quantization | None = None
    """fp8, int8: store the weights of a checkpoint that is not quantized in 8 bits, while loading it (on a CPU, which
    has no fp8, int8 alone takes less memory); a checkpoint that is quantized says so itself."""
    num_threads: int | None = None
    """CPU threads of the model; default: OMP_NUM_THREADS, else one per core that this process may use, within
    the CPU limit of its container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Count = 16
    """Tokens per block."""
    num_kv_blocks: Count | None = None
    """Fixes the pool's size in blocks; default: from memory."""
    kv_cache_memory: _Size | None = None
    """Bytes for the KV cache (also 512M, 4G), taken at start; default: from what is free, which a CPU takes as it
    fills."""
    gpu_memory_utilization: Annotated[float, Between(0, 1, over=True)] = 0.9
    """Share of the device's memory that weights, activations and KV cache may take together."""
    kv_cache_dtype: KVCacheDType = "auto"
    """fp8: keep keys and values in 8 bits (e4m3), which holds twice the tokens; fp8_e5m2: with more range and less
    precision, for models whose keys are large; auto: in the model's type."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of equal prompt prefixes."""

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps."""

    max_num_seqs: _Seats = 256
    """Requests that run at once; unless given, no more than max_num_batched_tokens."""
    max_num_batched_tokens: _StepTokens = 2048
    """Tokens computed per step, over all requests; unless given, 8192 on GPUs of 70 GB or more from Hopper on, and no
    fewer than max_num_seqs."""
    long_prefill_token_threshold: Count | None = None
    """Most tokens of one prompt in one step while others wait or run; default: a quarter of max_num_batched_tokens,
    at least 512 (and never over max_num_batched_tokens)."""
    policy: Policy = "fcfs"
    """priority: smaller `priority` first, then arrival."""
    max_num_queued_reqs: Count = 4096
    """Waiting requests beyond which new ones are refused with 429."""
    max_num_queued_tokens: Count | None = 2**24
    """Waiting prompt tokens beyond which new requests are refused with 429, for want of memory (some 40 bytes each)."""

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is under max_num_seqs ({self.max_num_seqs}): "
                "each running request needs a token per step; raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How the device computes a step. The defaults need nothing compiled at start."""

    attention_backend: AttentionBackendName = "auto"
    """Kernels of attention on a GPU. flash: FlashAttention in torch 2.12 and later; it takes --block-size 256, or any
    block size where FlashAttention 3 is installed. auto: triton until flash has been measured to be faster."""
    native_kernels: bool = True
    """On a CPU: attention, experts, norms and rotation by compiled kernels, where the package was made with a C++
    compiler; else, in float16, and where prompts attend over latents, torch computes."""
    cuda_graphs: CudaGraphs = "auto"
    """Which steps are replayed as CUDA graphs; auto: full_and_piecewise on a GPU. On a CPU auto records steps of
    decoding, none does not."""
    cuda_graph_sizes: Annotated[str, Words()] | None = None
    """Tokens per captured step, e.g. 1,2,4,8; default: from max_num_seqs, denser where steps are small."""
    compile: bool = False
    """Let torch.compile fuse what stands between the attention layers; starts slower, the result is kept on disk."""
    async_scheduling: bool | None = None
    """Plan and launch the next step while one runs; default: on a GPU."""
    cascade_attention: bool = False
    """Attend once to the prefix that all running requests share; has no effect on a CPU."""
    logits_processors: Annotated[str, Words()] | None = None
    """Plug-ins that edit logits, by the names that their packages give them: NAME,NAME; each after the one before."""
    profile_cache: bool = True
    """Remember how much of a GPU's memory a step of this model takes, so that the next start need not measure it."""
    cache_dir: str | None = None
    """Folder of what is remembered between starts; default: ~/.cache/pagefleet."""

    @property
    def processor_names(self) -> tuple[str, ...]:
        """Names of the logits processors in the order of their edits."""
        return tuple(name.strip() for name in (self.logits_processors or "").split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Answers that hold a form."""

    structured_outputs_backend: StructuredOutputsBackend = "auto"
    """The library that holds forms; auto: the one that holds the most of each."""
    structured_outputs_timeout: Annotated[Seconds, Between(0, over=True)] = 10.0
    """Seconds that compiling one form may take; one that takes longer is refused."""
    structured_outputs_memory: _Size = 2 * 2**30
    """Memory that compiling one form may take, in a process of its own."""
    structured_outputs_cache: _Size = 512 * 2**20
    """Memory for compiled forms that may be asked for again; cache_dir keeps more of them, for other replicas too."""

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything one engine needs."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    parallel: Parallelism = field(default_factory=Parallelism)

    @property
    def num_devices(self) -> int:
        """That it runs on, over all data ranks."""
        return self.parallel.data_ranks * self.parallel.world_size

    @property
    def max_requests(self) -> int:
        """Requests that run at once, over all data ranks."""
        return self.scheduler.max_num_seqs * self.parallel.data_ranks

    @property
    def max_in_flight(self) -> int:
        """Requests that run or wait, over all data ranks."""
        return self.max_requests + self.scheduler.max_num_queued_reqs * self.parallel.data_ranks

    @property
    def carries(self) -> bool:
        """Whether ranks launch transfers of K/V among their steps, in one order for all."""
        several = self.parallel.shares_experts or not self.parallel.is_alone
        return several and self.kv_transfer.kv_data_plane == "nccl"

    @property
    def has_processes(self) -> bool:
        """Whether ranks have processes of their own, beside the engine core's."""
        return self.carries or not self.parallel.is_alone

    @property
    def takes_unasked(self) -> bool:
        """Whether ranks take steps by themselves, as what they are told next must not wait for one."""
        return self.parallel.pipeline_parallel_size > 1 or self.carries

    def __post_init__(self) -> None:
        plane, role = self.kv_transfer.kv_data_plane, self.kv_transfer.kv_role
        shared = self.parallel.shares_experts
        if plane == "nccl" and role == "both" and (shared or self.parallel.world_size > 1):
            raise ConfigError(
                f"{'copies share experts' if shared else self.parallel.describe()}, and by kv_data_plane nccl they "
                "send K/V or receive it, as engines that do both could wait for each other for ever: give kv_role "
                "prefill or decode"
            )
        if plane == "cuda_ipc" and self.parallel.is_networked:
            raise ConfigError(
                "kv_data_plane cuda_ipc is of one machine, and ranks may be on others (nnodes, or "
                "distributed_executor_backend ray): give auto or tcp"
            )
        if self.parallel.world_size == 1:
            return
        if self.execution.compile:
            ranks = self.parallel.describe()
            raise ConfigError(f"{ranks}, and torch.compile cannot trace what ranks send each other: leave compile out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: HostName = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on; 0 takes a free one."""
    api_server_count: Annotated[int, Between(1, 64)] = 1
    """Processes that answer HTTP on the port and turn text into tokens and back, over the same engine: more than one
    where a core of the processor is busy with that. Responses that can be asked for again are the first one's."""
    api_key_file: str | None = None
    """File of API keys, one a line; default: no key is asked for."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """API keys themselves. Other users of this machine can read them in its list of processes: prefer api_key_file."""
    console: bool = True
    """Serve a page for browsers at /, and what it shows at /console/state."""
    cors_origins: Annotated[tuple[str, ...], Shown("ORIGIN")] = ()
    """Origin whose web pages may call this server, e.g. https://chat.example.com, or *."""
    drain_timeout: Annotated[Seconds, Between(0)] = 30.0
    """Seconds that running requests get after SIGTERM."""
    max_body_bytes: Annotated[Bytes, Between(1024)] = 8 * 2**20
    """Largest request body."""
    metrics_names: MetricsNames = "pagefleet"
    """vllm: /metrics has the figures that vLLM tells too a second time, under its names, for dashboards made for it."""
    access_log: bool = False
    """Log one line per request (never its text)."""
    check: bool = False
    """Check the settings, and whether the folders that they name are there; then end, and load nothing."""
    log_rates: bool = True
    """Log every ten seconds, while there is traffic, tokens a second, requests, KV cache and prefix hits."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools; default: as its chat template shows."""
    reasoning_parser: str | None = None
    """How the model marks its thoughts; default: as its chat template shows."""
    trust_request_chat_template: bool = False
    """Render chat templates that requests bring."""
    kv_events_port: TwoPorts = 0
    """Port where routers hear what the prefix cache gains and loses, and on the next one ask for what they missed; of
    each data rank 4 more; 0: nowhere."""
    kv_events_host: HostName | None = None
    """Address of these two ports; default: host. One that is not loopback needs a fleet key."""
    fleet_key_file: str | None = None
    """File of the secret that engines and routers of one service share: with it KV events are encrypted and only for
    routers that have it too."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each request; default: nobody."""
    otlp_traces_sample: Share = 1.0
    """Share of the requests that come without a trace for which one is begun; of others their trace decides."""
    profiler_dir: str | None = None
    """Folder of profiles, which POST /start_profile and /stop_profile record; default: none are recorded."""
    response_store: str | None = None
    """Folder of stored responses (/v1/responses), on a disk of this machine; default: ~/.cache/pagefleet/responses."""
    response_store_size: Annotated[Bytes, Between(0)] = 2**28
    """Bytes of stored responses, of which the least recently used go first; 0: none is stored."""
    response_store_days: Annotated[float, Between(0, 3650, over=True)] = 30.0
    """Days since its last use after which a stored response goes."""
    data_parallel_supervisor_port: Port = 0
    """With data_parallel_multi_port_external_lb: port where /livez and /readyz are those of all copies together; 0: the
    one after theirs."""
    headless: bool = False
    """Run the ranks of one of nnodes machines and no server: port answers /livez and /readyz alone."""
    deployment_revision: str | None = None
    """Hash of the settings that whoever starts this engine gives it, for the console; default: none is shown."""

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Where KV events are published; None: nowhere."""
        if not self.kv_events_port:
            return None
        return KvEventsConfig(self.kv_events_host or self.host, self.kv_events_port, self.fleet_key_file)

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file are both given: write all keys into the file, one a line")
        self._check_kv_events()
        try:
            allow(self.cors_origins)
        except CorsError as error:
            raise ConfigError(f"cors_origins {error}") from None
        try:
            if self.otlp_traces_endpoint is not None:
                traces_url(self.otlp_traces_endpoint)
        except TracesError as error:
            raise ConfigError(f"otlp_traces_endpoint {error}") from None

    def _check_kv_events(self) -> None:
        events = self.kv_events
        if events is None:
            return
        if self.port in (events.port, events.port + 1):
            raise ConfigError(
                f"kv_events_port takes ports {events.port} and {events.port + 1}, and port is one of them"
            )
        if events.fleet_key_file is None and not _is_loopback(events.host):
            raise ConfigError(
                f"KV events on {events.host} could be read by others: give fleet_key_file, or a loopback kv_events_host"
            )


NO_FLEET_KEY = (
    "nnodes is more than 1, and without a secret anybody could join: make one (`openssl rand -hex 32 > fleet.key`), "
    "and give all nodes that file by --fleet-key-file"
)


def check_together(engine: EngineConfig, server: ServerConfig) -> None:
    """Check what settings of one mean for the other.

    Raises:
        ConfigError: they cannot work together.
    """
    if server.kv_events is not None and not engine.cache.enable_prefix_caching:
        raise ConfigError("kv_events_port is given and prefix caching is off: leave one of them out")
    count = engine.parallel.data_ranks
    _check_nodes(engine.parallel, server)
    if server.profiler_dir is not None and count > 1:
        raise ConfigError(
            "profiler_dir is of one copy of the model, and data_parallel_size makes several: leave it out, or give "
            "each a port of its own by data_parallel_multi_port_external_lb"
        )


def _check_nodes(parallel: Parallelism, server: ServerConfig) -> None:
    if server.headless and parallel.node_rank == 0:
        raise ConfigError("headless is for node_rank 1 and on: node 0 has the server; give this one its --node-rank")
    if parallel.node_rank > 0 and not server.headless:
        raise ConfigError(f"node_rank is {parallel.node_rank}, and the server is node 0's: add --headless")
    if parallel.nnodes > 1 and parallel.data_parallel_size > parallel.data_ranks:
        raise ConfigError(
            f"nnodes is {parallel.nnodes}, and copies of the model would have servers of their own: leave "
            "data_parallel_multi_port_external_lb and data_parallel_rank out, or start an engine for each copy"
        )
    if parallel.nnodes > 1 and server.fleet_key_file is None:
        raise ConfigError(NO_FLEET_KEY)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def cpu_threads(requested: int | None) -> int:
    """Return how many threads a model computes with: so many, or OMP_NUM_THREADS, or one per core that this process may
    use.

    Raises:
        ConfigError: the number is under 1.
    """
    if requested is not None and requested < 1:
        raise ConfigError(f"num_threads is {requested}: give at least 1, or leave it out")
    environment = os.environ.get("OMP_NUM_THREADS", "")
    return requested or (int(environment) if environment.isdecimal() else 0) or usable_cores()


def default_cache_dir(requested: str | None) -> Path:
    """The folder asked for, or pagefleet's own under the user's cache folder."""
    if requested is not None:
        return Path(requested).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagefleet"
