"""The two parts of a disaggregated service, each seen as if it were a service of its own.

All that plans engines by an InferenceService so plans those of one part, without knowing of the other.
"""

from __future__ import annotations

from pagefleet_protocol.inference_service import DisaggregatedRole, InferenceService, Resources
from pagefleet_protocol.inference_status import EngineRole, InferenceServiceStatus, PairRole
from pagefleet_protocol.parallelism import Parallelism

from pagefleet_operator.plan.pair_rollout import Pair

PAIR_ROLES: tuple[PairRole, PairRole] = ("prefill", "decode")


def is_disaggregated(service: InferenceService) -> bool:
    """Return whether prompts and answers are computed by different engines."""
    return service.spec.disaggregation is not None


def role_spec(service: InferenceService, role: PairRole) -> DisaggregatedRole:
    """Return what is wanted of one part of a disaggregated service."""
    both = service.spec.disaggregation
    assert both is not None, "asked of disaggregated services"
    return both.prefill if role == "prefill" else both.decode


def refuses_without_kv(service: InferenceService) -> bool:
    """Return whether a request ends whose K/V does not arrive; else a decode engine computes its prompt."""
    both = service.spec.disaggregation
    return both is not None and both.fallback == "Fail"


def role_view(service: InferenceService, role: PairRole) -> InferenceService:
    """Return the service with the engines of one part for its engines: their number, flags and resources."""
    part = role_spec(service, role)
    spec = service.spec
    return service.model_copy(
        update={
            "spec": spec.model_copy(
                update={
                    "engine": spec.engine.model_copy(
                        update={
                            "args": (*spec.engine.args, *part.args),
                            "kv_offload": part.kv_offload or spec.engine.kv_offload,
                        }
                    ),
                    "replicas": part.replicas,
                    "autoscaling": part.autoscaling,
                    "resources": _over(_with_gpus(part, spec.resources), spec.resources),
                    "parallelism": _own_ranks(part, spec.parallelism),
                    "nodes": _own_nodes(part, spec.nodes),
                }
            ),
            "status": role_status_view(service.status, role),
        }
    )


def engine_views(service: InferenceService) -> dict[EngineRole, InferenceService]:
    """Return the service as each kind of its engines sees it."""
    if is_disaggregated(service):
        return {role: role_view(service, role) for role in PAIR_ROLES}
    return {"engine": service}


def role_status_view(status: InferenceServiceStatus | None, role: PairRole) -> InferenceServiceStatus | None:
    """Return a status whose `scaling` is that of one part."""
    if status is None:
        return None
    found = next((one.scaling for one in status.role_scaling if one.name == role), None)
    return status.model_copy(update={"scaling": found})


def both_or_none(service: InferenceService, wanted: Pair) -> Pair:
    """Return the engines of both parts; an autoscaler that wants none of one part has to wait for the other's word."""
    if wanted.empty or (wanted.prefill and wanted.decode):
        return wanted
    least = [scaling.min if (scaling := role_spec(service, role).autoscaling) else 1 for role in PAIR_ROLES]
    return Pair(wanted.prefill or least[0], wanted.decode or least[1])


def _own_ranks(part: DisaggregatedRole, default: Parallelism) -> Parallelism:
    """Return the ranks of a part: its own as a whole, those that its GPUs make, or the service's."""
    return part.parallelism.over(Parallelism(expert=default.expert) if part.resources.gpus is not None else default)


def _own_nodes(part: DisaggregatedRole, default: int | None) -> int | None:
    """Return over how many nodes a part's engines are: its own, or the service's where its ranks are the service's."""
    own_ranks = part.parallelism.counted or part.resources.gpus is not None
    return part.nodes or (None if own_ranks else default)


def _with_gpus(part: DisaggregatedRole, default: Resources) -> Resources:
    """Return what a part's engines get, with a GPU for each of a node's ranks that are its own, where there are GPUs.

    Without `tensor` its ranks follow from the service's GPUs.
    """
    own = part.parallelism
    if own.tensor is None or part.resources.gpus is not None or not default.gpus:
        return part.resources
    ranks = own.tensor * (own.pipeline or 1) * (own.data or 1)
    return part.resources.model_copy(update={"gpus": -(-ranks // (part.nodes or 1))})


def _over(given: Resources, default: Resources) -> Resources:
    written = {name: value for name, value in given if value is not None}
    return default.model_copy(update=written)
