"""What crosses the socket between the API process and the engine core: msgspec structs, msgpack, `ipc://`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from pagefleet_protocol.engine_facts import KvTransferFacts
from pagefleet_protocol.kv_handoff import KvFault, KvTransfer
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.core.outputs import Waits


class AddRequest(msgspec.Struct, tag="add", frozen=True, array_like=True):
    """Admit a prompt with its `sampling.n` outputs. Limits are checked again by the core, which trusts no sender."""

    request_id: str
    """Outputs are told under `output_ids`."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    priority: int = 0
    """Smaller runs earlier, under the priority policy."""
    cache_salt: str | None = None
    adapter: str | None = None
    resumed_token_ids: list[int] = []
    """Output that counts as the request's own already; only what comes after it is told."""
    transfer: KvTransfer | None = None
    """The leg of a P/D transfer that this request is; the API process has checked where it comes from."""

    @property
    def output_ids(self) -> list[str]:
        """One id per output: the request's own where there is one."""
        n = self.sampling.n
        return [self.request_id] if n == 1 else [f"{self.request_id}/{index}" for index in range(n)]


class AbortRequests(msgspec.Struct, tag="abort", frozen=True, array_like=True):
    """End these requests; unknown ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True, array_like=True):
    """Forget every cached block that no request holds."""


class AskerGone(msgspec.Struct, tag="asker_gone", frozen=True, array_like=True):
    """An API process has ended: so do its requests. Sent by the one that started it."""

    asker: int
    start: int
    """Number of the start that has ended: what is still to be read of it is for nobody."""


class Drain(msgspec.Struct, tag="drain", frozen=True, array_like=True):
    """The engine is to end soon: take nothing on for other engines any more."""


class StartProfile(msgspec.Struct, tag="start_profile", frozen=True, array_like=True):
    """Record the steps from now on; answered by `Profiled`."""


class StopProfile(msgspec.Struct, tag="stop_profile", frozen=True, array_like=True):
    """Write down what was recorded; answered by `Profiled`."""


ToCore = AddRequest | AbortRequests | AskerGone | ResetPrefixCache | Drain | StartProfile | StopProfile


class WireLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step gave one request. Made per running request and step, and never part of a cycle."""

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it goes on."""
    stop_token_id: int | None = None
    """The stop token (not the end-of-text token) that ended it."""
    error: str | None = None
    """With finish_reason `error`: what to tell the client."""
    error_kind: str | None = None
    """`invalid` (400), `queue_full` (429), `kv_load_failed` (503), `out_of_memory` or `failed` (500)."""
    logprobs: list[WireLogprobs] | None = None
    prompt_logprobs: list[WireLogprobs] | None = None
    num_cached_tokens: int | None = None
    """With the first output: prompt tokens that came from the prefix cache."""
    error_param: str | None = None
    """With error_kind `invalid`: the field at fault."""
    error_code: str | None = None
    """With error_kind `invalid`: a short machine-readable reason."""
    retry_after_s: float | None = None
    """With error_kind `queue_full`: when to try again."""
    waits: Waits | None = None
    """With the first output."""
    kv_fault: KvFault | None = None
    """With error_kind `kv_load_failed`: whose doing it was, where that is known."""
    form_complete: bool = False
    """With finish_reason `stop`: the last token is of the text, which has its form with it."""


class CoreStats(msgspec.Struct, frozen=True, array_like=True):
    """The core's gauges and running totals, sent with each batch of outputs."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    """Share of blocks held by requests, 0 to 1."""
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    preemptions: int
    steps: int
    messages_dropped: int = 0
    """Bytes on the socket that were no message."""
    gpu_idle_seconds: float = 0.0
    """Time that the device waited for the host between two steps."""
    nan_requests: int = 0
    """Requests ended because the model's output for them was not a number."""
    out_of_memory_steps: int = 0
    """Steps for which the device had no room."""
    kv_events: int = 0
    """Batches of KV events that were published."""
    kv_events_dropped: int = 0
    """Messages and connections on their ports that were nothing for us."""
    kv_transfer: Mapping[str, float] = {}
    """Counters and gauges of the KV connector, by the names of docs/metrics.md; up to a quarter of a second old."""
    transfers_owed: int = 0
    """Transfers of K/V to other engines that go on after their requests have ended."""
    forms: Mapping[str, float] = {}
    """Counters and gauges of the forms that answers hold, by the names of docs/metrics.md."""
    prefix_misses_tokens: Sequence[int] = ()
    """Prompt tokens not found in the prefix cache, in the order of `MISS_REASONS`."""
    step_sizes: Sequence[int] = ()
    """Steps by their tokens, as `StepSizes` counts them."""
    step_tokens: int = 0
    """Tokens of all steps."""
    experts: Mapping[str, float] = {}
    """What ranks with experts of a mixture were wanted, by the names of docs/metrics.md."""


class StepOutputs(msgspec.Struct, tag="outputs", frozen=True, array_like=True):
    """Everything one step (or an idle core's answer) has to say."""

    outputs: list[RequestOutput]
    stats: CoreStats


class Ready(msgspec.Struct, tag="ready", frozen=True, array_like=True):
    """The core has loaded the model and takes requests."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    startup_seconds: dict[str, float] = {}
    """Phase of the start -> seconds it took."""
    scope: str = ""
    """`PrefixScope.model` of its cached blocks."""
    kv_transfer: KvTransferFacts | None = None
    """How it passes K/V to other engines; None: not at all."""


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True, array_like=True):
    """The core could not start; `message` is one line for the user."""

    message: str
    by_setting: bool = False
    """Whether a setting is to blame; else it is the model."""
    address_taken: bool = False
    """Whether that setting is an address which may be free by the next time."""


class Profiled(msgspec.Struct, tag="profiled", frozen=True, array_like=True):
    """The answer to a message about a profile, in the order of these."""

    path: str = ""
    """Of the file that was written."""
    refused: str = ""
    """Why nothing was done; empty: it was."""


FromCore = StepOutputs | Ready | StartFailed | Profiled
