"""The status of an InferenceService: what is so, why, and what to do about it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagefleet_protocol.resource_base import Object

ConditionType = Literal[
    "Ready",
    "ModelCached",
    "EngineReady",
    "PrefillReady",
    "DecodeReady",
    "KVLinkReady",
    "RouterReady",
    "Progressing",
    "Degraded",
    "ScalingActive",
]
EngineRole = Literal["engine", "prefill", "decode"]
"""What engines are for: whole requests, or one part of them."""
PairRole = Literal["prefill", "decode"]
"""The parts of a disaggregated service."""
Role = Literal["engine", "prefill", "decode", "router"]


class Condition(Object):
    """One statement about the service, as Kubernetes has them."""

    type: ConditionType
    """Which statement."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """One word, for machines; docs/troubleshooting.md has a chapter on each."""
    message: str
    """What is so, and what to do about it."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed, RFC 3339."""
    observed_generation: int
    """metadata.generation that this is about."""


class RoleStatus(Object):
    """How many of one role's processes there are."""

    name: Role
    """The role."""
    replicas: int
    """Wanted."""
    ready: int
    """Answering requests now."""
    updated: int
    """Running the wanted revision."""
    revision: str
    """Hash of the wanted settings."""


class ResolvedMemory(Object):
    """What one engine, or each of its ranks with a GPU, needs of its device's memory, in GiB."""

    weights: float
    """The model's weights."""
    kv: float
    """KV cache of one sequence of maxModelLen tokens."""
    device: float | None = None
    """What the device has; none where no profile tells."""


class ResolvedStatus(Object):
    """The settings in force, after profile and defaults."""

    revision: str = ""
    """Revision of the model: a commit or a digest; empty where the source has none."""
    profile: str = ""
    """InferenceProfile that gave defaults; empty for none."""
    image: str = ""
    """Image of the engines."""
    dtype: str = ""
    """Type of weights and activations."""
    quantization: str = ""
    """Quantization of the weights; empty for none."""
    cache: str = ""
    """How engines get at the model: none, pvc, hostPath, image, builtin or file."""
    gpus: int = 0
    """GPUs of each node of an engine."""
    nodes: int = 1
    """Pods per engine."""
    tensor: int = 1
    """Ranks per engine that compute every layer together."""
    pipeline: int = 1
    """Stages per engine."""
    data: int = 1
    """Copies of the model per engine."""
    expert: bool = False
    """Whether ranks have experts whole."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens."""
    memory: ResolvedMemory | None = None
    """Memory needed, once the model's facts are known."""
    why: Annotated[tuple[str, ...], Field(strict=False, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = ()
    """Where each setting that nobody gave comes from."""


class LiveStatus(Object):
    """Numbers from the routers, renewed at most every 30 seconds."""

    requests_running: int
    """Requests that engines compute now."""
    requests_waiting: int
    """Requests that wait in engines."""
    tokens_per_second: float
    """Generated tokens since the numbers before."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1, mean over engines."""
    at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When they were read, RFC 3339."""


class ScalingStatus(Object):
    """The autoscaler's last decision, renewed when it changes and else at most every 30 seconds."""

    mode: Literal["Internal", "External", "Advisory"]
    """Who scales."""
    current: int
    """Engines that exist."""
    desired: int
    """Engines that there should be."""
    reason: str
    """One word; docs/autoscaling.md explains each."""
    signal: str = ""
    """The numbers behind it, in one line."""
    at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it was written, RFC 3339."""


class RoleScalingStatus(Object):
    """The autoscaler's last decision about one part of a disaggregated service."""

    name: PairRole
    """The part."""
    scaling: ScalingStatus
    """What was decided, and why."""


class RatioAdvice(Object):
    """How many prefill and decode engines the measured load asks for; spec says what there is."""

    prefill: float
    """Engines that the arriving prompts keep busy."""
    decode: float
    """Engines that the running requests fill."""
    message: str
    """What to change, and the numbers behind it."""
    at: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it was written, RFC 3339."""


class CanaryStatus(Object):
    """How far a new revision is that is tried out, or how its trial ended."""

    revision: str
    """The new one."""
    phase: Literal["Starting", "Analysing", "Promoted", "RolledBack"]
    """Starting: the step's engines are not all there yet. Analysing: they get their share. Promoted: it replaces the
    old one. RolledBack: it was worse, and gets nothing until the spec is another one."""
    step: int
    """Of spec.rollout.canary.steps, from 1."""
    percent: int
    """Share of the requests that it gets now."""
    message: str
    """What was found, or is waited for."""
    since: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When phase or step last changed, RFC 3339."""


class InferenceServiceStatus(Object):
    """What is so."""

    observed_generation: int
    """metadata.generation that this status is about."""
    model_name: str
    """What clients write as `model`."""
    mode: Literal["Aggregated", "Disaggregated", "Paused"] = "Aggregated"
    """Aggregated: each engine computes prompts and answers. Disaggregated: they are computed by different engines.
    Paused: the operator leaves everything as it is."""
    url: str | None = None
    """Where clients send requests."""
    ready: str = ""
    """Engines ready of engines wanted, e.g. 1/2."""
    replicas: int = 0
    """Engines that exist, for the scale subresource."""
    selector: str = ""
    """Selects the engine pods, for the scale subresource."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            strict=False,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    """Ready, ModelCached, EngineReady, RouterReady, Progressing, Degraded; ScalingActive where there is autoscaling;
    PrefillReady, DecodeReady, KVLinkReady where there is disaggregation."""
    roles: Annotated[
        tuple[RoleStatus, ...],
        Field(
            strict=False,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Counts of engines and routers."""
    resolved: ResolvedStatus | None = None
    """The settings in force, and why."""
    live: LiveStatus | None = None
    """What the engines do now."""
    scaling: ScalingStatus | None = None
    """What the autoscaler decided, and why."""
    role_scaling: Annotated[
        tuple[RoleScalingStatus, ...],
        Field(
            strict=False,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """What the autoscalers of prefill and decode decided, and why."""
    canary: CanaryStatus | None = None
    """The new revision that is tried out, or was last."""
    ratio: RatioAdvice | None = None
    """Prefill and decode engines by the measured load, where there is disaggregation and enough load to tell."""
