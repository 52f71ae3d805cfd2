"""Which changes of a status are worth a Kubernetes Event: a condition that turned, or turned to another reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.inference_status import (
    CanaryStatus,
    Condition,
    ConditionType,
    InferenceServiceStatus,
    ScalingStatus,
)

from pagefleet_operator.plan.canary import step_of
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.verdict import find_condition

_TOLD: tuple[ConditionType, ...] = ("Degraded", "Ready", "ModelCached", "KVLinkReady", "Progressing", "ScalingActive")
"""Conditions whose turns are told, the most telling first. Ready has the reasons of EngineReady and RouterReady."""
_SILENT = frozenset(
    {
        Reason.AS_WANTED,
        Reason.NOT_NEEDED,
        Reason.STARTING,
        Reason.LOADING_MODEL,
        Reason.WAITING,
        Reason.WAITING_FOR_MODEL,
        Reason.SCALING,
        Reason.PARTLY_READY,
        Reason.CANARY,
        Reason.SCALED_BY_DEMAND,
        Reason.IDLE,
        Reason.WAKING,
        Reason.ADVISED,
        Reason.SCALED_OUTSIDE,
        Reason.KV_LINKED,
    }
)
"""Passing states of every start and every rollout, and what the autoscaler's own events tell."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def announcements(before: InferenceServiceStatus | None, after: InferenceServiceStatus) -> tuple[Announcement, ...]:
    """Return what has changed; nothing where only counts, percentages or words have."""
    told = [*_all_scaled(before, after), *_tried_out(before, after.canary)]
    for kind in _TOLD:
        condition = find_condition(after, kind)
        if condition is None or condition.reason in {one.reason for one in told}:
            continue
        if _turned(find_condition(before, kind), condition):
            severity: Literal["Normal", "Warning"] = "Normal" if condition.reason in NORMAL else "Warning"
            told.append(Announcement(severity, condition.reason, condition.message))
    return tuple(told)


def _all_scaled(before: InferenceServiceStatus | None, after: InferenceServiceStatus) -> Iterator[Announcement]:
    """Yield what the autoscaler of the engines changed, or those of both parts."""
    if before is None:
        return
    yield from _scaled(before.scaling, after.scaling)
    known = {one.name: one.scaling for one in before.role_scaling}
    for part in after.role_scaling:
        yield from _scaled(known.get(part.name), part.scaling, f"{part.name} ")


def _scaled(old: ScalingStatus | None, new: ScalingStatus | None, of_part: str = "") -> Iterator[Announcement]:
    if old is None or new is None or old.mode != new.mode or old.desired == new.desired or new.mode == "External":
        return
    if new.reason == Reason.AT_QUOTA and new.desired < old.desired:
        return  # nothing goes: fewer came than were wanted, and ScalingActive tells of the quota
    if new.mode == "Advisory":
        reason = "ScalingAdvised"
    elif new.desired == 0:
        reason = "ScaledToZero"
    elif old.desired == 0:
        reason = "WokenUp"
    else:
        reason = "ScaledUp" if new.desired > old.desired else "ScaledDown"
    yield Announcement(
        "Normal",
        reason,
        f"from {old.desired} to {new.desired} {of_part}engine{'' if new.desired == 1 else 's'} ({new.reason}): "
        f"{new.signal}",
    )


def _tried_out(before: InferenceServiceStatus | None, now: CanaryStatus | None) -> Iterator[Announcement]:
    """Yield each step of a trial, and its end; that it went back is told by the condition."""
    if now is not None and now.phase != "RolledBack" and step_of(before.canary if before else None) != step_of(now):
        yield Announcement("Normal", f"Canary{now.phase}", now.message)


def _turned(before: Condition | None, after: Condition) -> bool:
    if after.status == "Unknown" or after.reason in _SILENT:
        return False
    if before is None:
        # What a service starts with is news only where it is trouble.
        return after.reason != Reason.SETTLED
    return (before.status, before.reason) != (after.status, after.reason)
