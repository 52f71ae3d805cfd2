"""What the status says of a disaggregated service alone, from what was seen of its two parts in a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import ConditionType, InferenceServiceStatus, RoleScalingStatus

from pagefleet_operator.plan.autoscaling import scaling_status, scaling_verdict
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.role_health import RoleSeen, role_verdict
from pagefleet_operator.plan.roles import PAIR_ROLES, role_spec, role_status_view, role_view
from pagefleet_operator.plan.verdict import Verdict


def both_verdict(parts: Sequence[RoleSeen], gate: Verdict | None) -> Verdict | None:
    """Return EngineReady: the part that is worse off has the word. None: there are no parts, or nothing is wanted."""
    if not any(one.wanted for one in parts):
        return None
    verdicts = [role_verdict(one, gate) for one in parts]
    first = next((one for one in verdicts if not one.holds), None)
    return first or Verdict(True, Reason.ALL_READY, ", ".join(one.count for one in parts))


def part_verdicts(
    parts: Sequence[RoleSeen], gate: Verdict | None, link: Verdict | None, asleep: Verdict | None
) -> dict[ConditionType, Verdict]:
    """Return the conditions that only a disaggregated service has.

    Args:
        parts: prefill and decode engines; empty: it has none.
        gate: why there are none yet, where there are none on purpose.
        link: KVLinkReady.
        asleep: why none are wanted, where an autoscaler wants none.
    """
    if link is None:
        return {}
    prefill, decode = (asleep or role_verdict(one, gate) for one in parts)
    return {"PrefillReady": prefill, "DecodeReady": decode, "KVLinkReady": asleep or link}


def parts_scaling(
    service: InferenceService, observed: Observed, parts: Sequence[RoleSeen], routers: int
) -> Verdict | None:
    """Return ScalingActive: the word of the part that wants something done, else of prefill. None: nobody scales.

    Args:
        service: what is wanted.
        observed: with the decisions.
        parts: empty: the service is not disaggregated.
        routers: that have been ready for long enough to have been asked.
    """
    scaled = [role for role in PAIR_ROLES if parts and role_spec(service, role).autoscaling is not None]
    found = [scaling_verdict(role_view(service, one), observed.role_scaling.get(one), routers) for one in scaled]
    return next((one for one in found if not one.holds or one.reason not in NORMAL), found[0] if found else None)


def role_scaling(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    parts: Sequence[RoleSeen],
    at: str,
) -> tuple[RoleScalingStatus, ...]:
    """Return status.roleScaling.

    Args:
        service: what is wanted.
        previous: its last status.
        observed: with the decisions.
        parts: prefill and decode engines; empty: the service is not disaggregated.
        at: now, RFC 3339.
    """
    found = []
    for role, seen in zip(PAIR_ROLES, parts, strict=False):
        view, before = role_view(service, role), role_status_view(previous, role)
        told = scaling_status(view, before, observed.role_scaling.get(role), len(seen.pods), at)
        if told is not None:
            found.append(RoleScalingStatus(name=role, scaling=told))
    return tuple(found)
