"""What an InferenceService needs to run: one workload of engines, or one for each part, and one of routers.

A workload says what every one of its instances is like. `local/` makes processes of it, `render/` pods of Deployments;
where it runs (host, port, device, volumes) is for them to add.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pagefleet_protocol.inference_service import EnvVar, InferenceService
from pagefleet_protocol.inference_status import PairRole, Role
from pagefleet_protocol.kube_names import LIVE_PATH, READY_PATH

from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_operator.plan.command_lines import engine_args, has_disk, needs_key, router_args, shares_kv_events
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.pair_rollout import Pair, Rollout
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import PAIR_ROLES, both_or_none, is_disaggregated, role_view

Verb = Literal["serve", "route"]


@dataclass(frozen=True, slots=True)
class Probes:
    """HTTP paths that tell whether an instance lives, and whether it may get traffic."""

    live: str = LIVE_PATH
    ready: str = READY_PATH


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
    """Of each node of an instance."""
    nodes: int = 1
    """Processes, or pods, that are one instance together; the first of them serves."""
    endpoints: int = 1
    """Engines that routers see of each instance: data ranks on ports of their own."""
    caches: int = 1
    """Data ranks of each instance, which have KV ports of their own, behind one port too."""
    cpu: str | None = None
    """Cores of each instance, as a quantity; None: an equal share."""
    progress_s: float = 1800.0
    """An instance that is not ready after so long has failed."""
    probes: Probes = Probes()
    kv_events: bool = False
    """Whether engines tell routers what they have cached."""
    kv_disk: bool = False
    """Whether each instance needs a folder of its own for K/V."""
    keyed: bool = False
    """Whether engines and routers have to know each other by the fleet key."""
    fleet_key: int = 1
    """Number of that key."""
    pair_revision: str = ""
    """Of both parts of a disaggregated service; empty: it is none of them."""

    @property
    def revision(self) -> str:
        """Hash of all that needs a new process when it changes; `replicas` does not."""
        return self.pair_revision or self.own_revision

    @property
    def own_revision(self) -> str:
        """The same of this workload alone, where another one has to change with it."""
        env = [variable.model_dump(mode="json") for variable in self.env]
        parts = [self.verb, self.args, env, self.gpus, self.cpu, self.kv_events, self.fleet_key if self.keyed else 0]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted workloads of one InferenceService."""

    engine: Workload
    """For whole requests; none of them where there are parts."""
    router: Workload
    parts: tuple[Workload, ...] = ()
    """Prefill and decode engines of a disaggregated service."""

    @property
    def num_engines(self) -> int:
        """Engines that are wanted, of whatever kind."""
        return sum(one.replicas for one in self.parts or (self.engine,))


@dataclass(frozen=True, slots=True)
class PartSettings:
    """What is in force for one part of a disaggregated service."""

    resolved: Resolved
    scaling: ScalingSeen | None = None
    """The autoscaler's decision, where there is one."""


def plan_workloads(
    service: InferenceService,
    resolved: Resolved,
    location: str,
    spare_gpu: bool = True,
    scaling: ScalingSeen | None = None,
    parts: Mapping[PairRole, PartSettings] | None = None,
) -> Plan:
    """Return what `service` needs.

    Args:
        location: of the model where engines run: a folder, or builtin://tiny.
        spare_gpu: whether one engine more than `replicas` finds a GPU. Without one, an old engine has to go before the
            new one starts.
        scaling: the autoscaler's decision, where there is one.
        parts: of a disaggregated service.
    """
    paired = is_disaggregated(service)
    rollout = _engine_rollout(service, resolved, spare_gpu)
    whole = replace(
        engine_workload(service, resolved, location),
        replicas=0 if paired else wanted_engines(service, service.status, scaling, None),
        rollout=rollout,
    )
    router = router_workload(service, resolved, service.spec.rollout.drain_seconds)
    return Plan(whole, router, _parts(service, location, parts or {}, spare_gpu) if paired else ())


def engine_workload(
    service: InferenceService, resolved: Resolved, location: str, role: PairRole | None = None
) -> Workload:
    """Return what every engine is like, however many there are.

    Args:
        service: what is wanted, or what is wanted of one part.
    """
    spec = service.spec
    return Workload(
        name=f"{service.name}-{role or 'engine'}",
        role=role or "engine",
        verb="serve",
        args=engine_args(service, resolved, location, role),
        replicas=spec.replicas,
        drain_timeout_s=float(spec.rollout.drain_seconds),
        rollout=Rollout(resolved.max_surge, resolved.max_unavailable),
        env=resolved.env,
        gpus=resolved.gpus,
        nodes=resolved.nodes,
        endpoints=resolved.ranks.endpoints,
        caches=resolved.ranks.data,
        cpu=resolved.cpu,
        progress_s=float(spec.rollout.progress_seconds),
        kv_events=shares_kv_events(service, resolved),
        kv_disk=has_disk(resolved),
        keyed=needs_key(service, resolved),
        fleet_key=spec.fleet_key,
    )


def router_workload(service: InferenceService, resolved: Resolved, drain_s: int) -> Workload:
    """Return what every router is like. `drain_s`: what open requests get once it has to end."""
    return Workload(
        name=router_name(service),
        role="router",
        verb="route",
        args=router_args(service, drain_s),
        replicas=service.spec.router.replicas,
        drain_timeout_s=float(drain_s),
        rollout=Rollout(max_surge=0, max_unavailable=1, keep_slots=True),
        kv_events=shares_kv_events(service, resolved),
        keyed=needs_key(service, resolved),
        fleet_key=service.spec.fleet_key,
    )


def _parts(
    service: InferenceService, location: str, settings: Mapping[PairRole, PartSettings], spare_gpu: bool
) -> tuple[Workload, ...]:
    """Return the workloads of both parts; a change of one changes the revision of both."""
    views = {role: role_view(service, role) for role in PAIR_ROLES}
    counts = (wanted_engines(view, view.status, settings[role].scaling, None) for role, view in views.items())
    wanted = both_or_none(service, Pair(*counts))
    parts = []
    for role, replicas in zip(PAIR_ROLES, (wanted.prefill, wanted.decode), strict=True):
        resolved = settings[role].resolved
        rollout = _engine_rollout(service, resolved, spare_gpu)
        part = engine_workload(views[role], resolved, location, role)
        parts.append(replace(part, replicas=replicas, rollout=rollout))
    joint = hashlib.sha256("".join(one.own_revision for one in parts).encode()).hexdigest()[:10]
    return tuple(replace(one, pair_revision=joint) for one in parts)


def router_name(service: InferenceService) -> str:
    """Return what the routers of a service are called, without their numbers."""
    return f"{service.name}-router"


def _engine_rollout(service: InferenceService, resolved: Resolved, spare_gpu: bool) -> Rollout:
    """What a person wrote counts; else what is known of this moment's GPUs, before what a profile supposes."""
    written = service.spec.rollout
    if not resolved.gpus or written.max_surge is not None or written.max_unavailable is not None:
        return Rollout(resolved.max_surge, resolved.max_unavailable)
    return Rollout(max_surge=1, max_unavailable=0) if spare_gpu else Rollout(max_surge=0, max_unavailable=1)
