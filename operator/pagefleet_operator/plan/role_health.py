"""How the engines, or the routers, of one InferenceService are: counts, and the one reason why some do not serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from pagefleet_protocol.inference_status import Role, RoleStatus
from pagefleet_protocol.kube_names import LABEL_REVISION

from pagefleet_operator.plan.names import ChildNames, child_stem
from pagefleet_operator.plan.observed import Observed, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog, pod_trouble, refused_pods, worst
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
_ENDED_FOR = timedelta(minutes=10)
"""Pods that ended longer ago say nothing about now; they lie about until Kubernetes removes them."""


ROUTERS_FOLLOW_WITHIN = timedelta(seconds=15)
"""So soon after the first engine, or their own birth, routers are ready; before that it is no trouble."""


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """The pods of one role, and what they should be."""

    role: Role
    wanted: int
    revision: str
    """Wanted; empty while there is neither a wanted Deployment nor one that exists."""
    body: Mapping[str, Any] | None
    """Of our Deployment, where it exists."""
    pods: tuple[PodSeen, ...]
    """That run or are to run."""
    troubles: tuple[Trouble, ...]
    """Of pods that do not serve, and of those that cannot be made."""
    new_troubles: tuple[Trouble, ...]
    """Those of the wanted revision alone."""

    @property
    def ready(self) -> int:
        """Pods that take requests."""
        return sum(pod.ready for pod in self.pods)

    @property
    def updated(self) -> int:
        """Pods of the wanted revision."""
        return sum(pod.revision == self.revision for pod in self.pods)

    @property
    def old(self) -> int:
        """Pods of other revisions."""
        return len(self.pods) - self.updated

    @property
    def count(self) -> str:
        """Words for how many are ready."""
        return f"{self.ready} of {self.wanted} {self.noun} ready"

    @property
    def noun(self) -> str:
        """What they are called."""
        return f"{self.role} engines" if self.role in PAIR_ROLES else f"{self.role}s"

    def status(self) -> RoleStatus:
        """Return the counts as the status has them."""
        return RoleStatus(
            name=self.role, replicas=self.wanted, ready=self.ready, updated=self.updated, revision=self.revision
        )


def see_role(role: Role, service: tuple[str, str], wanted: int, revision: str, observed: Observed) -> RoleSeen:
    """Gather what was seen of one role.

    Args:
        role: engine, router, or a part of a disaggregated service.
        service: its namespace and name.
        wanted: replicas in the spec; another field manager that scales the Deployment has the last word.
        revision: of the Deployment that is wanted; empty where the one that exists stays as it is.
        observed: everything that was seen.
    """
    namespace, name = service
    names = ChildNames(child_stem(name))
    deployment = names.router if role == "router" else names.engine if role == "engine" else names.part(role, revision)
    child = observed.children.get(("Deployment", deployment))
    body = child.body if child and child.ours else None
    if child and child.ours and child.scaled_by:
        wanted = _number(child.body, "spec", "replicas", default=wanted)
    log = EventLog(observed.events)
    mine = [pod for pod in observed.pods if _is_of(pod, role)]
    live = tuple(pod for pod in mine if not pod.deleting and pod.phase not in ("Failed", "Succeeded"))
    silent = [pod for pod in live if not pod.ready] + [pod for pod in mine if _tells(pod, log, observed)]
    revision = revision or _revision_of(body)
    troubles = [(pod.revision, _trouble(pod, log, namespace, observed)) for pod in silent]
    refused = refused_pods(deployment, _creation_failures(body))
    if refused:
        troubles.append((revision, refused))
    return RoleSeen(
        role=role,
        wanted=wanted,
        revision=revision,
        body=body,
        pods=live,
        troubles=tuple(trouble for _, trouble in troubles),
        new_troubles=tuple(trouble for of, trouble in troubles if of == revision),
    )


def both_parts(prefill: RoleSeen, decode: RoleSeen) -> RoleSeen:
    """Return the engines of a disaggregated service together."""
    return RoleSeen(
        role="engine",
        wanted=prefill.wanted + decode.wanted,
        revision=decode.revision,
        body=decode.body or prefill.body,
        pods=(*prefill.pods, *decode.pods),
        troubles=(*prefill.troubles, *decode.troubles),
        new_troubles=(*prefill.new_troubles, *decode.new_troubles),
    )


def role_verdict(seen: RoleSeen, gate: Verdict | None = None) -> Verdict:
    """Return EngineReady or RouterReady.

    Args:
        seen: the role's pods.
        gate: why there is no Deployment yet, where there is none on purpose.
    """
    if seen.wanted == 0:
        return NO_PAIR if seen.role in PAIR_ROLES else SCALED_TO_ZERO
    if seen.ready >= seen.wanted:
        return Verdict(True, Reason.ALL_READY, seen.count)
    if gate and seen.body is None and not seen.pods:
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
    deadline = _condition(seen.body, "Progressing", "False", "ProgressDeadlineExceeded")
    if seen.wanted and ((seen.old and failing) or (deadline and (seen.old or seen.ready < seen.wanted))):
        return _stopped(seen, worst(troubles))
    if seen.old:
        updated = f"{seen.updated} of {seen.wanted} {seen.noun} run the new settings"
        hindrance = worst(troubles)
        return Verdict(True, Reason.ROLLING_OUT, f"{updated}; {hindrance.message}" if hindrance else updated)
    if len(seen.pods) != seen.wanted and not (troubles and len(seen.pods) < seen.wanted):
        return Verdict(True, Reason.SCALING, f"{len(seen.pods)} {seen.noun} exist, {seen.wanted} are wanted")
    if seen.ready >= seen.wanted:
        return None
    if troubles:
        return Verdict(False, Reason.WAITING, f"waits for {seen.noun} to recover; {seen.role.title()}Ready says why")
    return Verdict(True, Reason.STARTING, seen.count)


def revision_fails(seen: RoleSeen) -> bool:
    """Return whether the wanted revision has stopped with nothing ready. Where one is, others may fail by bad luck."""
    told = role_progress(seen)
    stopped = told is not None and told.reason is Reason.ROLLOUT_STOPPED
    return stopped and not any(pod.ready for pod in seen.pods if pod.revision == seen.revision)


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


def _is_of(pod: PodSeen, role: Role) -> bool:
    """Whether a pod counts for a role: engines for whole requests do so as decode engines, where those take over."""
    if role in PAIR_ROLES:
        return pod.component == "engine" and (pod.role or "decode") == role
    return pod.component == role


def _trouble(pod: PodSeen, log: EventLog, namespace: str, observed: Observed) -> Trouble:
    """Say why `pod` does not serve. A router without an engine takes no requests, which is no fault of its own."""
    trouble = pod_trouble(pod, log, namespace)
    runs = not pod.reason and any(one.state == "running" for one in pod.containers)
    if pod.component != "router" or not runs or trouble.reason not in (Reason.NOT_READY, Reason.STARTING):
        return trouble
    engines = [one for one in observed.pods if one.component == "engine" and one.ready and not one.deleting]
    if not engines:
        return Trouble(Reason.STARTING, f"{pod.name} takes requests once an engine is ready")
    first = min((one.turned for one in engines if one.turned), default=None)
    since = max((moment for moment in (pod.created, first) if moment), default=None)
    if since is None or observed.now - since >= ROUTERS_FOLLOW_WITHIN:
        return trouble
    return Trouble(Reason.STARTING, f"{pod.name} runs and is not ready yet")


def _tells(pod: PodSeen, log: EventLog, observed: Observed) -> bool:
    """Whether a pod that is no more says why another is missing: it was ended lately, or its node is gone."""
    if pod.phase == "Failed":
        return bool(pod.reason) and pod.created is not None and observed.now - pod.created < _ENDED_FOR
    return pod.deleting and not pod.ready and bool(log.about("Pod", pod.name, "NodeNotReady"))


def _creation_failures(body: Mapping[str, Any] | None) -> tuple[str, ...]:
    condition = _condition(body, "ReplicaFailure", "True")
    return (str(condition.get("message", "")),) if condition else ()


def _condition(
    body: Mapping[str, Any] | None, kind: str, status: Literal["True", "False"], reason: str = ""
) -> Mapping[str, Any] | None:
    for condition in conditions_of(body):
        if (condition.get("type"), condition.get("status")) == (kind, status):
            return condition if not reason or condition.get("reason") == reason else None
    return None


def conditions_of(body: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the conditions in the status of a Deployment or Job; none where it has no status yet."""
    status = body.get("status") if body else None
    found = status.get("conditions") if isinstance(status, Mapping) else None
    return tuple(one for one in found if isinstance(one, Mapping)) if isinstance(found, list | tuple) else ()


def _number(body: Mapping[str, Any], *path: str, default: int) -> int:
    value: Any = body
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else default


def _revision_of(body: Mapping[str, Any] | None) -> str:
    value: Any = body
    for part in ("spec", "template", "metadata", "labels", LABEL_REVISION):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""
