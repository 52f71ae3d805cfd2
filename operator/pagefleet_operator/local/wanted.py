"""What a manifest asks of this machine: each InferenceService with its settings in force, or why it cannot run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet_protocol.inference_service import Cache, InferenceService, RouterResources
from pagefleet_protocol.inference_status import PairRole

from pagefleet_operator.autoscale.scaler import scales_itself
from pagefleet_operator.errors import ManifestError
from pagefleet_operator.local.manifest import Manifest
from pagefleet_operator.plan.autoscaling import least_engines, least_of_view
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated, role_spec, role_view
from pagefleet_operator.plan.verdict import Refusal

_NO_CLAIM = (
    "spec.model.uri: pvc:// is a volume of a cluster: on this machine give file:///path of a folder with the same files"
)

_INSTEAD = {
    "model.secretRef": "credentials come from the environment: HF_TOKEN, AWS_ACCESS_KEY_ID ...",
    "engine.kvOffload.disk.storageClass": "the state folder holds it: --state-dir puts it on another disk",
    "resources.memory": "--kv-cache-memory in spec.engine.args bounds the KV cache",
    "resources.gpuType": "no InferenceProfile here has it",
    "autoscaling": "mode External: nobody scales here, spec.replicas counts",
    "router.auth": "routers ask for keys where PAGEFLEET_ROUTER_API_KEY_FILE names a file of them",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One InferenceService, ready to be planned."""

    service: InferenceService
    resolved: Resolved
    parts: Mapping[PairRole, Resolved] = field(default_factory=dict)
    """The settings of both parts of a disaggregated service."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def gpus(self) -> int:
        """Of all its engines, of the least number where autoscaling chooses it."""
        return sum(self.gpus_by_workload.values())

    @property
    def gpus_by_workload(self) -> Mapping[str, int]:
        """The same for each of its workloads of engines, by its name."""
        if self.parts:
            views = {role: role_view(self.service, role) for role in self.parts}
            return {
                f"{self.name}-{role}": _gpus_of(self.parts[role]) * least_of_view(view) for role, view in views.items()
            }
        return {f"{self.name}-engine": _gpus_of(self.resolved) * least_engines(self.service)}


def read_wanted(manifest: Manifest, environment: Mapping[str, str]) -> tuple[Wanted, ...]:
    """Decide the settings of all services of a manifest.

    Raises:
        ManifestError: with everything that keeps one of them from running here.
    """
    profiles = {profile.name: profile for profile in manifest.profiles}
    wanted: list[Wanted] = []
    problems: list[str] = []
    for service in manifest.services:
        resolved = resolve(service, profiles, None)
        if isinstance(resolved, Refusal):
            problems.append(f"{service.name}: {resolved}")
            continue
        parts = {role: resolve(role_view(service, role), profiles, None) for role in _roles(service)}
        refusals = [part for part in parts.values() if isinstance(part, Refusal)]
        problems += [f"{service.name}: {refusal}" for refusal in refusals[:1]]
        usable = {role: part for role, part in parts.items() if isinstance(part, Resolved)}
        wanted.append(Wanted(service, resolved, usable))
        problems += [f"{service.name}: {problem}" for problem in _obstacles(resolved, environment)]
    if problems:
        raise ManifestError(problems)
    return tuple(wanted)


def _roles(service: InferenceService) -> tuple[PairRole, ...]:
    return PAIR_ROLES if is_disaggregated(service) else ()


def ignored_fields(wanted: Wanted) -> tuple[str, ...]:
    """Return the fields of a service that change nothing on this machine, with what to do instead where there is."""
    spec, resolved = wanted.service.spec, wanted.resolved
    unknown_type = bool(spec.resources.gpu_type) and resolved.profile is None
    given = {
        "model.secretRef": spec.model.secret_ref is not None,
        "cache": spec.cache != Cache(),
        "autoscaling": spec.autoscaling is not None and not scales_itself(spec.autoscaling),
        "engine.image": bool(resolved.image),
        "engine.kvOffload.disk.storageClass": any(_names_a_class(one) for one in (resolved, *wanted.parts.values())),
        "resources.memory": resolved.memory is not None,
        "resources.shm": spec.resources.shm is not None,
        "resources.gpuType": unknown_type,
        "router.auth": spec.router.auth is not None,
        "router.resources": spec.router.resources != RouterResources(),
        "router.inferencePool": spec.router.inference_pool is not None,
        "expose": spec.expose.type != "ClusterIP",
        "monitoring.serviceMonitor": spec.monitoring.service_monitor,
        "monitoring.labels": bool(spec.monitoring.labels),
        "podTemplate": bool(spec.pod_template),
        **{
            f"disaggregation.{role}.podTemplate": bool(role_spec(wanted.service, role).pod_template)
            for role in _roles(wanted.service)
        },
    }
    names = [name for name, is_given in given.items() if is_given]
    return tuple(f"spec.{name} ({_INSTEAD[name]})" if name in _INSTEAD else f"spec.{name}" for name in names)


def _names_a_class(resolved: Resolved) -> bool:
    disk = resolved.kv_offload.disk if resolved.kv_offload else None
    return disk is not None and disk.storage_class is not None


def check_gpus(wanted: tuple[Wanted, ...], total: int) -> list[str]:
    """Return what is wrong with the GPUs that services ask for, one line each; nothing when they fit."""
    asked = sum(one.gpus for one in wanted)
    if asked <= total:
        return []
    have = "this machine has no GPU" if total == 0 else f"this machine has {total}"
    largest = max(_gpus_of(one) for each in wanted for one in (each.parts.values() or (each.resolved,)))
    if total == 0:
        remedy = "set it to 0 to compute on the CPU"
    elif largest > total:
        remedy = f"one engine takes {largest}: lower it, or spec.parallelism.tensor where that is given"
    else:
        remedy = "lower replicas, or autoscaling.min"
    parts = ", ".join(f"{one.name} {one.gpus}" for one in wanted if one.gpus)
    return [f"spec.resources.gpus: {asked} GPUs are asked for ({parts}) and {have}; {remedy}"]


def _gpus_of(resolved: Resolved) -> int:
    """Return the GPUs of one engine."""
    return resolved.gpus * resolved.nodes


def _obstacles(resolved: Resolved, environment: Mapping[str, str]) -> list[str]:
    found = [_NO_CLAIM] if resolved.uri.scheme == "pvc" else []
    for variable in resolved.env:
        source = variable.value_from
        if source is not None and variable.name not in environment:
            found.append(
                f"spec.engine.env: {variable.name} comes from the Secret {source.secret_key_ref.name}, which only a "
                f"cluster has: on this machine set the environment variable {variable.name}"
            )
    return found
