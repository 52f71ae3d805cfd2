"""What an InferenceService needs to run: one workload of engines, one of routers.

A workload says what every one of its instances is like. Where it runs (host, port, device) is for whoever runs it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from pagefleet_protocol.inference_service import InferenceService, Resources
from pagefleet_protocol.kube_names import LIVE_PATH, READY_PATH

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
    resources: Resources
    drain_timeout_s: float
    """Time that running requests get after SIGTERM."""
    rollout: Rollout
    probes: Probes = Probes()

    @property
    def revision(self) -> str:
        """Hash of all that needs a new process when it changes; `replicas` does not."""
        parts = [self.verb, self.args, self.resources.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted workloads of one InferenceService."""

    engine: Workload
    router: Workload


def plan_workloads(service: InferenceService, drain_timeout_s: float, spare_gpu: bool = True) -> Plan:
    """Return what `service` needs.

    Args:
        service: what is wanted.
        drain_timeout_s: time that running requests get when an instance is replaced.
        spare_gpu: whether one engine more than `replicas` finds a GPU. Without one, an old engine has to go before the
            new one starts.
    """
    surge = spare_gpu or not service.spec.resources.gpus
    return Plan(
        engine=Workload(
            name=f"{service.name}-engine",
            role="engine",
            verb="serve",
            args=_engine_args(service, drain_timeout_s),
            replicas=service.spec.replicas,
            resources=service.spec.resources,
            drain_timeout_s=drain_timeout_s,
            rollout=Rollout(max_surge=1, max_unavailable=0) if surge else Rollout(max_surge=0, max_unavailable=1),
        ),
        router=Workload(
            name=router_name(service),
            role="router",
            verb="route",
            args=("--policy", service.spec.router.policy, "--drain-timeout", f"{drain_timeout_s:g}"),
            replicas=service.spec.router.replicas,
            resources=Resources(),
            drain_timeout_s=drain_timeout_s,
            rollout=Rollout(max_surge=0, max_unavailable=1, keep_slots=True),
        ),
    )


def router_name(service: InferenceService) -> str:
    """Return what the routers of a service are called, without their numbers."""
    return f"{service.name}-router"


def _engine_args(service: InferenceService, drain_timeout_s: float) -> tuple[str, ...]:
    engine = service.spec.engine
    context = () if engine.max_model_len is None else ("--max-model-len", str(engine.max_model_len))
    return (
        _model_location(service.spec.model.uri),
        *("--served-model-name", service.model_name),
        *("--dtype", engine.dtype or "auto"),
        *context,
        *("--drain-timeout", f"{drain_timeout_s:g}"),
        *engine.args,
    )


def _model_location(uri: str) -> str:
    """Return what `pagefleet serve` takes: a path for file://, the URI itself for builtin models."""
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri
