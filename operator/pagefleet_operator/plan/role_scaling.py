"""What the status says of autoscalers: of the one of all engines, or of those of both parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus, PairRole, RoleScalingStatus

from pagefleet_operator.plan.autoscaling import scaling_status, scaling_verdict
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.pair_rollout import Pair
from pagefleet_operator.plan.reasons import NORMAL
from pagefleet_operator.plan.roles import (
    PAIR_ROLES,
    both_or_none,
    is_disaggregated,
    role_spec,
    role_status_view,
    role_view,
)
from pagefleet_operator.plan.verdict import Verdict


def active_verdict(
    service: InferenceService, whole: ScalingSeen | None, parts: Mapping[PairRole, ScalingSeen], routers: int
) -> Verdict | None:
    """Return ScalingActive; of two parts the one that wants something done has the word, else prefill.

    Args:
        service: what is wanted.
        whole: the decision about engines for whole requests.
        parts: those about engines of a disaggregated service.
        routers: that have been ready for long enough to have been asked.

    Returns:
        None where nobody scales.
    """
    if service.spec.autoscaling is not None:
        return scaling_verdict(service, whole, routers)
    if not is_disaggregated(service):
        return None
    scaled = [role for role in PAIR_ROLES if role_spec(service, role).autoscaling is not None]
    found = [scaling_verdict(role_view(service, one), parts.get(one), routers) for one in scaled]
    return next((one for one in found if not one.holds or one.reason not in NORMAL), found[0] if found else None)


def role_scaling(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    seen: Mapping[PairRole, ScalingSeen],
    current: Mapping[PairRole, int],
    at: str,
) -> tuple[RoleScalingStatus, ...]:
    """Return status.roleScaling of a disaggregated service.

    Args:
        service: what is wanted.
        previous: its last status.
        seen: the decisions.
        current: engines of each part that exist.
        at: now, RFC 3339.
    """
    found = []
    prefill, decode = (seen[role].desired if role in seen else 1 for role in PAIR_ROLES)
    wanted = both_or_none(service, Pair(prefill, decode))
    for role, engines in zip(PAIR_ROLES, (wanted.prefill, wanted.decode), strict=True):
        view, before, own = role_view(service, role), role_status_view(previous, role), seen.get(role)
        told = scaling_status(view, before, replace(own, desired=engines) if own else None, current[role], at)
        if told is not None:
            found.append(RoleScalingStatus(name=role, scaling=told))
    return tuple(found)
