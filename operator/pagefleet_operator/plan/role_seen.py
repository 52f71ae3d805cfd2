"""How the engines, or the routers, of one InferenceService are: counts, and the one reason why some do not serve.

One form for pods and for processes: `role_health` makes it of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pagefleet_protocol.inference_status import Role, RoleStatus

from pagefleet_operator.plan.pod_reasons import worst
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.plan.verdict import NO_PAIR, SCALED_TO_ZERO, Trouble, Verdict

DOWNLOAD_REASONS = frozenset(
    {
        Reason.DOWNLOADING,
        Reason.MODEL_NOT_FOUND,
        Reason.ACCESS_DENIED,
        Reason.STORE_UNREACHABLE,
        Reason.CHECKSUM_MISMATCH,
        Reason.DISK_FULL,
        Reason.BAD_MODEL,
    }
)
"""Of pods that download the model themselves: ModelCached tells these, EngineReady that it waits."""
_MAY_PASS = frozenset(
    {
        Reason.INSUFFICIENT_GPU,
        Reason.UNSCHEDULABLE,
        Reason.CLAIM_PENDING,
        Reason.NODE_LOST,
        Reason.NOT_READY,
        Reason.STORE_UNREACHABLE,
    }
)
"""A rollout waits for these until its deadline: nodes are added, stores come back."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of them that runs or is to run."""

    revision: str
    ready: bool
    """It takes requests."""
    turned: datetime | None = None
    """When `ready` last changed; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """The members of one role, and what they should be."""

    role: Role
    wanted: int
    revision: str
    """Wanted; empty while there is nothing is wanted and nothing exists."""
    members: tuple[Member, ...]
    troubles: tuple[Trouble, ...]
    """Of members that do not serve, and of those that cannot be made."""
    new_troubles: tuple[Trouble, ...]
    """Those of the wanted revision alone."""
    made: bool = False
    """Whether something stands for them already, though it may have no member yet."""
    late: bool = False
    """Whether the wanted revision has made no progress for too long."""
    leaving: int = 0
    """Those that finish what they have, where the caller is to see them off."""

    @property
    def ready(self) -> int:
        """Members that take requests."""
        return sum(one.ready for one in self.members)

    @property
    def updated(self) -> int:
        """Members of the wanted revision."""
        return sum(one.revision == self.revision for one in self.members)

    @property
    def old(self) -> int:
        """Members of other revisions."""
        return len(self.members) - self.updated

    @property
    def missing(self) -> bool:
        """Whether nothing of them is there."""
        return not self.made and not self.members

    @property
    def count(self) -> str:
        """Words for how many are ready."""
        return f"{self.ready} of {self.wanted} {self.noun} ready"

    @property
    def noun(self) -> str:
        return f"{self.role} engines" if self.role in PAIR_ROLES else f"{self.role}s"

    def status(self) -> RoleStatus:
        return RoleStatus(
            name=self.role, replicas=self.wanted, ready=self.ready, updated=self.updated, revision=self.revision
        )


def both_parts(prefill: RoleSeen, decode: RoleSeen) -> RoleSeen:
    """Return the engines of a disaggregated service together."""
    return RoleSeen(
        role="engine",
        wanted=prefill.wanted + decode.wanted,
        revision=decode.revision,
        members=(*prefill.members, *decode.members),
        made=decode.made or prefill.made,
        troubles=(*prefill.troubles, *decode.troubles),
        new_troubles=(*prefill.new_troubles, *decode.new_troubles),
    )


class TrialOfRoles(NamedTuple):
    """The engines of a revision that is tried out."""

    engines: tuple[tuple[int, int], ...]
    """Of each role: how many the service is to have, and how many of the new revision answer."""
    trouble: str
    """Why some do not answer."""
    hopeless: bool
    """Whether that will not pass by itself."""


def see_trial(roles: Sequence[RoleSeen]) -> TrialOfRoles:
    """Return how engines of the wanted revision are, of engines of several; `roles`: one, or both parts."""
    ready = (sum(one.ready for one in seen.members if one.revision == seen.revision) for seen in roles)
    troubles = [one for seen in roles for one in seen.new_troubles if one.reason not in NORMAL]
    told = worst(troubles)
    failing = any(one.reason not in _MAY_PASS for one in troubles)
    engines = tuple(zip((seen.wanted for seen in roles), ready, strict=True))
    return TrialOfRoles(engines, told.message if told else "", hopeless=failing)


def role_verdict(seen: RoleSeen, gate: Verdict | None = None) -> Verdict:
    """Return EngineReady or RouterReady.

    Args:
        gate: why there are none yet, where there are none on purpose.
    """
    if seen.wanted == 0:
        return NO_PAIR if seen.role in PAIR_ROLES else SCALED_TO_ZERO
    if seen.ready >= seen.wanted:
        return Verdict(True, Reason.ALL_READY, seen.count)
    if gate and seen.missing:
        return gate
    trouble = worst(seen.troubles)
    if trouble is None:
        return Verdict(False, Reason.STARTING, seen.count)
    reason = Reason.WAITING_FOR_MODEL if trouble.reason in DOWNLOAD_REASONS else trouble.reason
    return Verdict(False, reason, f"{seen.count}; {trouble.message}")


def role_progress(seen: RoleSeen) -> Verdict | None:
    """Return what is still on its way, or has stopped on it; None where everything is as wanted."""
    troubles = [one for one in seen.new_troubles if one.reason not in NORMAL]
    failing = worst(one for one in troubles if one.reason not in _MAY_PASS)
    if seen.wanted and ((seen.old and failing) or (seen.late and (seen.old or seen.ready < seen.wanted))):
        return _stopped(seen, worst(troubles))
    if seen.old:
        updated = f"{seen.updated} of {seen.wanted} {seen.noun} run the new settings"
        hindrance = worst(troubles)
        return Verdict(True, Reason.ROLLING_OUT, f"{updated}; {hindrance.message}" if hindrance else updated)
    exist = len(seen.members) + seen.leaving
    if exist != seen.wanted and not (troubles and exist < seen.wanted):
        return Verdict(True, Reason.SCALING, f"{exist} {seen.noun} exist, {seen.wanted} are wanted")
    if seen.ready >= seen.wanted:
        return None
    if troubles:
        return Verdict(False, Reason.WAITING, f"waits for {seen.noun} to recover; {seen.role.title()}Ready says why")
    return Verdict(True, Reason.STARTING, seen.count)


def revision_fails(seen: RoleSeen) -> bool:
    """Return whether the wanted revision has stopped with nothing ready. Where one is, others may fail by bad luck."""
    told = role_progress(seen)
    stopped = told is not None and told.reason is Reason.ROLLOUT_STOPPED
    return stopped and not any(one.ready for one in seen.members if one.revision == seen.revision)


def _stopped(seen: RoleSeen, failing: Trouble | None) -> Verdict:
    cause = (
        failing.message if failing else f"no {seen.noun.removesuffix('s')} became ready within rollout.progressSeconds"
    )
    if seen.old and seen.ready:
        after = f"{seen.count.removesuffix(' ready')} keep serving"
    elif seen.old:
        after = "The old revision is not ready either"
    else:
        # A Deployment that may not have one pod too many ends the only old one first.
        after = "None of an older one is left to serve"
    return Verdict(
        False, Reason.ROLLOUT_STOPPED, f"the new revision fails. {after}. Correct the spec, or undo the edit: {cause}"
    )
