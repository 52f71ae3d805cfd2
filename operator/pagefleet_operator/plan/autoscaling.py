"""How many engines a service has under autoscaling, and what its status says of that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pagefleet_protocol.inference_service import Autoscaling, InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus, ScalingStatus

from pagefleet_operator.plan.observed import Observed, ScalingSeen
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Verdict

STATUS_PERIOD = timedelta(seconds=30)
"""While the decision stays, its numbers are renewed no more often: every change is written to the cluster's store."""
OUTSIDE = "ScaledOutside"
"""Reason of status.scaling in mode External."""


def wanted_engines(
    service: InferenceService, previous: InferenceServiceStatus | None, seen: ScalingSeen | None, deployed: int | None
) -> int:
    """Return how many engines there are to be.

    Args:
        service: what is wanted.
        previous: its last status.
        seen: the autoscaler's decision; None: it has not decided since the operator started.
        deployed: replicas of the Deployment; None: there is none.
    """
    scaling = service.spec.autoscaling
    if scaling is None or scaling.mode != "Internal":
        return service.spec.replicas
    if seen is not None:
        return within_bounds(scaling, seen.desired)
    before = previous.scaling if previous else None
    if before is not None and before.mode == "Internal":
        return within_bounds(scaling, before.desired)
    return within_bounds(scaling, deployed or scaling.min)


def most_engines(service: InferenceService) -> int:
    """Return how many engines there may come to be."""
    scaling = service.spec.autoscaling
    return scaling.max or scaling.min if scaling is not None and scaling.mode == "Internal" else service.spec.replicas


def within_bounds(scaling: Autoscaling, engines: int) -> int:
    """Return the number within min and max; 0 only where scaleToZero allows it."""
    if engines <= 0 and scaling.scale_to_zero is not None:
        return 0
    return max(scaling.min, min(scaling.max or engines, engines))


def idles(service: InferenceService, wanted: int) -> bool:
    """Return whether there are no engines because nobody asks, and the next request brings one."""
    scaling = service.spec.autoscaling
    return wanted == 0 and scaling is not None and scaling.mode == "Internal"


def scaling_status(
    service: InferenceService, previous: InferenceServiceStatus | None, observed: Observed, current: int
) -> ScalingStatus | None:
    """Return status.scaling.

    Args:
        service: what is wanted.
        previous: the last status.
        observed: what was seen, the decision among it.
        current: engines that exist.
    """
    scaling, seen = service.spec.autoscaling, observed.scaling
    if scaling is None:
        return None
    before = previous.scaling if previous and previous.scaling and previous.scaling.mode == scaling.mode else None
    if scaling.mode == "External":
        desired, reason, signal = service.spec.replicas, OUTSIDE, ""
    elif seen is None:
        return before
    else:
        desired, reason, signal = within_bounds(scaling, seen.desired), seen.reason, seen.signal
    now = _utc(observed.now)
    at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    renewed = ScalingStatus(mode=scaling.mode, current=current, desired=desired, reason=reason, signal=signal, at=at)
    if before is None or (before.desired, before.reason, before.current) != (desired, reason, current):
        return renewed
    young = now - _utc(datetime.fromisoformat(before.at)) < STATUS_PERIOD
    return before if young or before.signal == signal else renewed


def scaling_verdict(service: InferenceService, observed: Observed, routers_ready: int) -> Verdict:
    """Return ScalingActive, for a service with autoscaling."""
    scaling, seen = service.spec.autoscaling, observed.scaling
    assert scaling is not None, "asked of services with autoscaling"
    if scaling.mode == "External":
        text = f"spec.replicas is {service.spec.replicas}; whoever writes the scale subresource changes it"
        return Verdict(True, Reason.SCALED_OUTSIDE, text)
    if seen is None:
        return Verdict(None, Reason.WAITING, "the routers were not asked yet")
    if seen.reason == Reason.SIGNALS_MISSING:
        starting = Verdict(False, Reason.WAITING, "waits for a router; RouterReady says more")
        return Verdict(False, Reason.SIGNALS_MISSING, seen.signal) if routers_ready else starting
    if scaling.mode == "Advisory":
        return Verdict(True, Reason.ADVISED, f"in mode Internal {seen.desired} engines would be wanted: {seen.signal}")
    if seen.reason in (Reason.AT_MAXIMUM, Reason.AT_QUOTA, Reason.IDLE):
        return Verdict(True, seen.reason, f"{seen.desired} engines are wanted: {seen.signal}")
    return Verdict(True, Reason.SCALED_BY_DEMAND, "the number of engines follows the demand; status.scaling has it")


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
