"""What the browser console shows: `GET /console/state`, one JSON document of a router, or of one engine about itself.

Whoever asks sees what their key may see: lines of admission and requests of other tenants are left out, and without a
key nothing is told where keys are asked for. Rates and percentiles are of the last seconds, not since the start. What
is not known is null, never zero. Ratios are 0 to 1, times RFC 3339 in UTC.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

STATE_PATH = "/console/state"
MAX_NOTES = 50
"""Faults, and requests, that a document holds at most: the newest."""

Phase = Literal["starting", "loading", "ready", "draining", "unreachable"]
"""starting: is listed or answers, but does not serve yet. loading: brings its weights to the device. draining: ends
what it has, and gets nothing new. unreachable: answers no probe, or was taken out because it failed."""
EngineRole = Literal["both", "prefill", "decode"]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of the service, as its InferenceService tells it."""

    type: str
    """`Ready`, `EngineReady`, ... as in docs/kubernetes.md."""
    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word; docs/troubleshooting.md has a chapter on each."""
    message: str
    """What is so, and what to do about it."""


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and by whom."""

    name: str | None
    """Of the InferenceService; None: this router or engine belongs to none."""
    namespace: str | None
    """None outside a cluster."""
    models: tuple[str, ...]
    """What clients may write as `model`: models first, then their other names."""
    version: str
    """Of the program that answers."""
    statements: tuple[Statement, ...] = ()
    """Empty where nobody tells."""


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Two percentiles of a duration over the last minute."""

    p50: float
    p95: float


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Figures are None while it does not tell them."""

    name: str
    url: str
    """`http://host:port`, as the router reaches it; of no use to a browser. Empty from an engine about itself."""
    model: str
    role: EngineRole
    revision: str | None
    """Hash of the settings that it was started with; two values side by side are a rollout. None: not told."""
    phase: Phase
    reason: str | None
    """Why it is not ready, in words; None where it is."""
    load: float | None
    """Share of the weights that is loaded, 0 to 1; None: not told, or not in phase `loading`."""
    running: int | None
    """Requests that it computes now."""
    waiting: int | None
    """Requests that wait inside it."""
    max_running: int | None
    """Requests that it can compute at once."""
    prompt_tokens_s: float | None
    """Tokens of prompts a second, those found in its cache included."""
    generated_tokens_s: float | None
    kv_usage: float | None
    """Share of its K/V blocks in use."""
    prefix_hit_ratio: float | None
    """Of the prompt tokens of the last minute, the share that was found in its cache; None without prompts."""
    ttft: Seconds | None
    """From a request's arrival at the engine to its first token; None: no request in the last minute."""
    faults: int
    """How many of `ConsoleState.faults` are its own."""


class PairState(msgspec.Struct, frozen=True, kw_only=True):
    """K/V that went from one engine to another: prompts computed at `source`, answered by `target`."""

    source: str
    """Name of an engine."""
    target: str
    transfers: int
    """Since the router started."""
    transfers_s: float
    """A second, of the last half minute."""
    bytes_s: float
    """K/V of these prompts, of the last half minute: tokens that the target lacked times bytes of a token."""


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's line at the router's door."""

    tenant: str
    """Empty: no keys are asked for, and all is one line."""
    running: int
    """Requests that were let in and are not over."""
    waiting: int
    """Requests that wait for room."""
    refused: int
    """Requests that were turned away, since the router started."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the autoscaler."""

    at: str
    wanted: int
    """Engines that there should be."""
    reason: str
    """One word; docs/autoscaling.md explains each."""
    signal: str
    """The numbers behind it, in one line; may be empty."""


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler of one kind of engines does."""

    role: Literal["engine", "prefill", "decode"]
    """`engine`: for whole requests."""
    mode: Literal["Internal", "External", "Advisory"]
    """Internal: it scales. External: somebody else does. Advisory: it only says what it would do."""
    current: int
    """Engines that exist."""
    decisions: tuple[Decision, ...]
    """Newest first, at least one; those before it only as far as they were seen."""


class FaultState(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong."""

    at: str
    """When it last happened."""
    what: str
    """What happened, in one sentence."""
    remedy: str
    """What to do about it, in one sentence."""
    engine: str | None
    """Name of the engine that it was about; None: of none, or one that is gone."""
    count: int = 1
    """How often it happened, where it came again and again."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is over, with the way it took."""

    id: str
    """What the client got as `x-request-id`."""
    at: str
    """When it came."""
    tenant: str
    """Empty where no keys are asked for."""
    route: str
    """`/v1/chat/completions`, ..."""
    model: str | None
    """None where the request names none, or was refused before that was known."""
    status: int
    """HTTP status; 499: the client left before an answer."""
    error: str | None
    """Code of the error that ended it, `engine_lost` for one; None: it has an answer, or its engine's own error."""
    seconds: float
    """From its arrival to the end of the answer."""
    queue_seconds: float
    """Of these, until it was let in."""
    ttft_seconds: float | None
    """From its arrival to the first byte of a stream's answer; None: no stream, or no byte."""
    prompt_tokens: int | None
    """Counted where the router tokenizes, else estimated from bytes."""
    cached_tokens: int
    """Of these, those that the engine probably had, as it was chosen."""
    generated_tokens: int | None
    """As far as a stream tells; None: not known."""
    engine: str | None
    """The engine that answered, or the last that was tried; None: none was."""
    prefill_engine: str | None
    """The engine that computed the prompt for it; None: itself."""
    attempts: int
    """Engines that the request was sent to, one after another; 0: none."""
    tried: tuple[str, ...]
    """Engines that failed it, in their order; the answer came from elsewhere, or not at all."""
    trace_id: str | None
    """32 hexadecimal digits, where the request is traced."""


class ConsoleState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the console shows. Its ETag changes when anything but `at` does."""

    at: str
    """When this was true."""
    source: Literal["router", "engine"]
    """Who answers: an engine tells of itself alone, and has no `pairs` and no `admission`."""
    tenant: str | None
    """Whose key asks; None: no keys are asked for."""
    workers: int
    """Processes of the router or API processes of the engine, whose figures these are together; those that did not
    answer in time are left out."""
    service: ServiceState
    engines: tuple[EngineState, ...]
    pairs: tuple[PairState, ...] = ()
    admission: tuple[AdmissionState, ...] = ()
    scaling: tuple[ScalingState, ...] = ()
    """Empty: nobody scales, or the router cannot know."""
    faults: tuple[FaultState, ...] = ()
    """Newest first."""
    requests: tuple[RequestState, ...] = ()
    """Newest first."""


def encode_state(state: ConsoleState) -> tuple[str, bytes]:
    """Return a document's ETag, quoted, and its JSON."""
    timeless = msgspec.json.encode(msgspec.structs.replace(state, at=""))
    tag = hashlib.blake2b(timeless, digest_size=10).hexdigest()
    return f'"{tag}"', b'{"at":' + msgspec.json.encode(state.at) + timeless.removeprefix(b'{"at":""')


def decode_state(data: bytes) -> ConsoleState:
    """Parse a document.

    Raises:
        msgspec.MsgspecError: it is something else.
    """
    return msgspec.json.decode(data, type=ConsoleState)
