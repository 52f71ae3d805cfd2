"""What an InferenceService needs to run: one workload of engines, one of routers.

A workload says what every one of its instances is like. Where it runs (host, port, device) is for whoever runs it:
`local/` here. In a cluster `objects/` says the same with Deployments, from the same command lines.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.inference_service import EnvVar, InferenceService
from pagefleet_protocol.kube_names import LIVE_PATH, READY_PATH

from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_operator.plan.command_lines import engine_args, router_args
from pagefleet_operator.plan.objects.fleet_key import shares_kv_events
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.resolved import Resolved

Role = Literal["engine", "router"]
Verb = Literal["serve", "route"]


@dataclass(frozen=True, slots=True)
class Probes:
    """HTTP paths that tell whether an instance lives, and whether it may get traffic."""

    live: str = LIVE_PATH
    ready: str = READY_PATH


@dataclass(frozen=True, slots=True)
class Rollout:
    """How many instances may be too many, or too few, while a revision replaces another."""

    max_surge: int
    max_unavailable: int
    keep_slots: bool = False
    """True where an instance's number is its address: no number at or over `replicas` is ever used."""

    def __post_init__(self) -> None:
        if self.max_surge + self.max_unavailable < 1:
            raise AssertionError("a rollout that may neither add nor remove an instance never ends")


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal instances of one role."""

    name: str
    """Instances are called `<name>-<number>`."""
    role: Role
    verb: Verb
    """`pagefleet <verb>` is what each instance runs."""
    args: tuple[str, ...]
    """Flags apart from host, port and device."""
    replicas: int
    drain_timeout_s: float
    """Time that running requests get after SIGTERM."""
    rollout: Rollout
    env: tuple[EnvVar, ...] = ()
    gpus: int = 0
    """Of each instance."""
    cpu: str | None = None
    """Cores of each instance, as a quantity; None: an equal share."""
    progress_s: float = 1800.0
    """An instance that is not ready after so long has failed."""
    probes: Probes = Probes()
    kv_events: bool = False
    """Whether engines tell routers what they have cached: those then share the fleet key."""

    @property
    def revision(self) -> str:
        """Hash of all that needs a new process when it changes; `replicas` does not."""
        env = [variable.model_dump(mode="json") for variable in self.env]
        parts = [self.verb, self.args, env, self.gpus, self.cpu, self.kv_events]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted workloads of one InferenceService."""

    engine: Workload
    router: Workload


def plan_workloads(
    service: InferenceService,
    resolved: Resolved,
    location: str,
    spare_gpu: bool = True,
    scaling: ScalingSeen | None = None,
) -> Plan:
    """Return what `service` needs.

    Args:
        service: what is wanted.
        resolved: the settings in force.
        location: of the model where engines run: a folder, or builtin://tiny.
        spare_gpu: whether one engine more than `replicas` finds a GPU. Without one, an old engine has to go before the
            new one starts.
        scaling: the autoscaler's decision, where there is one.
    """
    spec = service.spec
    drain_timeout_s = float(spec.rollout.drain_seconds)
    kv_events = shares_kv_events(service, resolved)
    return Plan(
        engine=Workload(
            name=f"{service.name}-engine",
            role="engine",
            verb="serve",
            args=engine_args(service, resolved, location),
            replicas=wanted_engines(service, service.status, scaling, None),
            drain_timeout_s=drain_timeout_s,
            rollout=_engine_rollout(service, resolved, spare_gpu),
            env=resolved.env,
            gpus=resolved.gpus,
            cpu=resolved.cpu,
            progress_s=float(spec.rollout.progress_seconds),
            kv_events=kv_events,
        ),
        router=Workload(
            name=router_name(service),
            role="router",
            verb="route",
            args=router_args(service),
            replicas=spec.router.replicas,
            drain_timeout_s=drain_timeout_s,
            rollout=Rollout(max_surge=0, max_unavailable=1, keep_slots=True),
            kv_events=kv_events,
        ),
    )


def router_name(service: InferenceService) -> str:
    """Return what the routers of a service are called, without their numbers."""
    return f"{service.name}-router"


def _engine_rollout(service: InferenceService, resolved: Resolved, spare_gpu: bool) -> Rollout:
    """What a person wrote counts; else what is known of this moment's GPUs, before what a profile supposes."""
    written = service.spec.rollout
    if not resolved.gpus or written.max_surge is not None or written.max_unavailable is not None:
        return Rollout(resolved.max_surge, resolved.max_unavailable)
    return Rollout(max_surge=1, max_unavailable=0) if spare_gpu else Rollout(max_surge=0, max_unavailable=1)
