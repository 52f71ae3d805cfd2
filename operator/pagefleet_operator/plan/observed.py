"""What was seen of one InferenceService in a cluster: its children, its pods, and what they say.

Made by `handlers/` from watches and probes; read by the plan. Nothing here is remembered:
a restarted operator sees it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.model_facts import Progress

from pagefleet_operator.plan.canary import TrialFigures
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.pair_ratio import PairLoad

Component = Literal["engine", "follower", "router", "model"]
"""follower: a pod of an engine that is several, and not the one that serves."""
DOWNLOAD = "download"
"""Name of the container that downloads a model, in a job or before an engine."""
ChildKey = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class Child:
    """An object that the operator made, or one that has the name of an object which it wants to make."""

    body: Mapping[str, Any]
    """As the API server has it, without managedFields."""
    ours: bool
    """Whether its controller is this InferenceService (by uid)."""
    scaled_by: str = ""
    """The autoscaler that owns spec.replicas through the scale subresource; empty for none."""


@dataclass(frozen=True, slots=True)
class ContainerSeen:
    """One container of a pod."""

    name: str
    init: bool = False
    state: Literal["waiting", "running", "terminated"] = "waiting"
    reason: str = ""
    """Of waiting (ContainerCreating, ImagePullBackOff, CrashLoopBackOff ...) or terminated (OOMKilled, Error ...)."""
    message: str = ""
    exit_code: int | None = None
    restarts: int = 0
    last_reason: str = ""
    """Why it ended the time before."""
    last_message: str = ""
    last_exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which pod of an engine that is a group of pods, one on each node."""

    set_name: str
    """LeaderWorkerSet."""
    group: int
    node: int
    """0 leads."""
    nodes: int
    ranks: int
    """Of each node."""

    def __str__(self) -> str:
        first = self.node * self.ranks
        ranks = f"rank {first}" if self.ranks == 1 else f"ranks {first} to {first + self.ranks - 1}"
        return f"group {self.group}, node {self.node} of {self.nodes} ({ranks})"


@dataclass(frozen=True, slots=True)
class PodSeen:
    """One pod of an engine, a router, or a model job."""

    name: str
    component: Component
    revision: str
    uid: str = ""
    phase: str = "Pending"
    ready: bool = False
    deleting: bool = False
    node: str = ""
    ip: str = ""
    role: PairRole | None = None
    """Part of a disaggregated service; None: none."""
    place: GroupPlace | None = None
    """None: the pod is a whole engine, or none."""
    created: datetime | None = None
    turned: datetime | None = None
    """When `ready` last changed."""
    reason: str = ""
    """Of the pod itself: Evicted, UnexpectedAdmissionError (a broken GPU), NodeLost ..."""
    message: str = ""
    unschedulable: str = ""
    """The scheduler's message while it finds no node; empty once it has."""
    containers: tuple[ContainerSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class EventSeen:
    """A Kubernetes event about one of the pods, claims, jobs or replica sets."""

    kind: str
    name: str
    reason: str
    message: str
    last_seen: datetime


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """The API server refused one object when it was last applied."""

    kind: str
    name: str
    status: int
    """HTTP status; 0 when there was no answer."""
    reason: str
    """Kubernetes' word: Forbidden, Invalid, Conflict, NotFound ..."""
    message: str


@dataclass(frozen=True, slots=True)
class LiveSample:
    """Sums over the engines, read from the routers at one moment."""

    at: datetime
    requests_running: int
    requests_waiting: int
    kv_usage: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ScalingSeen:
    """The autoscaler's decision."""

    desired: int
    reason: str
    signal: str
    """The numbers behind it."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that the plan of one InferenceService depends on, apart from its spec."""

    now: datetime
    generation: int = 1
    """Of the spec that is planned."""
    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    pods: tuple[PodSeen, ...] = ()
    events: tuple[EventSeen, ...] = ()
    profiles: Mapping[str, InferenceProfile] = field(default_factory=dict)
    """All of the cluster, by name."""
    invalid_profiles: Mapping[str, str] = field(default_factory=dict)
    """Profiles that cannot be used: what is wrong with each."""
    optional_kinds: frozenset[str] = frozenset()
    """Of ServiceMonitor, InferencePool, HTTPRoute, Ingress, LeaderWorkerSet: those that the cluster knows."""
    progress: Progress | None = None
    """Of the model job, while it runs."""
    live: LiveSample | None = None
    scaling: ScalingSeen | None = None
    """None: there is no autoscaling, or nothing was decided since the operator started."""
    role_scaling: Mapping[PairRole, ScalingSeen] = field(default_factory=dict)
    """The same for the parts of a disaggregated service."""
    kv_engines: tuple[KvEngineSeen, ...] = ()
    """What engines of a disaggregated service said of their K/V transfer."""
    trial: TrialFigures | None = None
    """What routers counted of a revision that is tried out; None: they say nothing, or none is."""
    pair_load: PairLoad | None = None
    """What routers measured of a disaggregated service."""
    failures: tuple[ApplyFailure, ...] = ()
