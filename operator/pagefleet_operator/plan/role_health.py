"""Makes out of pods, or of processes of one machine, how the engines or the routers of an InferenceService are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from pagefleet_protocol.inference_status import Role

from pagefleet_operator.plan.engine_sets import find_set, instant, is_grouped, progress_s, revision_in
from pagefleet_operator.plan.group_reasons import group_troubles
from pagefleet_operator.plan.names import ChildNames, child_stem
from pagefleet_operator.plan.observed import Observed, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog, pod_trouble, refused_pods
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.role_seen import Member, RoleSeen
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.verdict import Trouble
from pagefleet_operator.plan.workloads import Workload

_ENDED_FOR = timedelta(minutes=10)
"""Pods that ended longer ago say nothing about now; they lie about until Kubernetes removes them."""


ROUTERS_FOLLOW_WITHIN = timedelta(seconds=15)
"""So soon after the first engine, or their own birth, routers are ready; before that it is no trouble."""


def see_role(role: Role, service: tuple[str, str], wanted: int, revision: str, observed: Observed) -> RoleSeen:
    """Gather what was seen of one role.

    Args:
        role: engine, router, or a part of a disaggregated service.
        service: its namespace and name.
        wanted: replicas in the spec; another field manager that scales the Deployment has the last word.
        revision: that is wanted; empty where the one that exists stays as it is.
    """
    namespace, name = service
    names = ChildNames(child_stem(name))
    deployment = names.router if role == "router" else names.engine if role == "engine" else names.part(role, revision)
    child = find_set(observed.children, deployment, revision)
    body = child.body if child else None
    if child and child.scaled_by:
        wanted = _number(child.body, "spec", "replicas", default=wanted)
    log = EventLog(observed.events)
    mine = [pod for pod in observed.pods if _is_of(pod, role)]
    live = tuple(pod for pod in mine if not pod.deleting and pod.phase not in ("Failed", "Succeeded"))
    silent = [pod for pod in live if not pod.ready] + [pod for pod in mine if _tells(pod, log, observed)]
    revision = revision or (revision_in(body) if body else "")
    troubles = [(pod.revision, _trouble(pod, log, namespace, observed)) for pod in silent]
    refused = refused_pods(deployment, _creation_failures(body))
    if refused:
        troubles.append((revision, refused))
    if body is not None and is_grouped(body):
        troubles += [(revision, one) for one in group_troubles(body, live, log, observed.now)]
    return RoleSeen(
        role=role,
        wanted=wanted,
        revision=revision,
        members=tuple(Member(pod.revision, pod.ready, pod.turned) for pod in live if pod.component != "follower"),
        made=body is not None,
        late=_is_late(body, [pod for pod in live if pod.revision == revision], observed.now),
        troubles=tuple(trouble for _, trouble in troubles),
        new_troubles=tuple(trouble for of, trouble in troubles if of == revision),
        leaving=_groups_on_their_way([pod for pod in mine if pod.component == "engine"], wanted),
    )


def _groups_on_their_way(leaders: Sequence[PodSeen], wanted: int) -> int:
    """Return how many groups are replaced right now: their number is theirs until a new leader has it."""
    live = {pod.place.group for pod in leaders if pod.place and not pod.deleting}
    going = {pod.place.group for pod in leaders if pod.place and pod.deleting}
    absent = set(range(wanted)) if any(group >= wanted for group in live) else set()
    return len((going | absent) - live)


def see_instances(workload: Workload, instances: Sequence[Instance]) -> RoleSeen:
    """Gather what was seen of one workload's instances on one machine."""
    live = [one for one in instances if one.state is not State.DRAINING]
    troubles = [(one.revision, told) for one in live if (told := _instance_trouble(workload, one))]
    return RoleSeen(
        role=workload.role,
        wanted=workload.replicas,
        revision=workload.revision,
        members=tuple(Member(one.revision, one.state is State.READY) for one in live),
        troubles=tuple(trouble for _, trouble in troubles),
        new_troubles=tuple(trouble for of, trouble in troubles if of == workload.revision),
        leaving=len(instances) - len(live),
    )


def _instance_trouble(workload: Workload, one: Instance) -> Trouble | None:
    """Say why a process does not serve; None: it does, or has not said anything yet."""
    name = f"{workload.name}-{one.number}"
    if one.failing:
        times = "" if one.restarts <= 1 else f" ({one.restarts} times)"
        return Trouble(Reason.CRASH_LOOP, f"{name} stopped{times}: {one.detail}")
    if one.state is State.NOT_READY:
        return Trouble(Reason.NOT_READY, f"{name} runs but takes no traffic: {one.detail}")
    return Trouble(Reason.STARTING, f"{name}: {one.detail}") if one.state is State.STARTING and one.detail else None


def _is_of(pod: PodSeen, role: Role) -> bool:
    """Whether a pod counts for a role: engines for whole requests do so as decode engines, where those take over."""
    component = "engine" if pod.component == "follower" else pod.component
    if role in PAIR_ROLES:
        return component == "engine" and (pod.role or "decode") == role
    return component == role


def _trouble(pod: PodSeen, log: EventLog, namespace: str, observed: Observed) -> Trouble:
    """Say why `pod` does not serve. A router without an engine takes no requests, which is no fault of its own."""
    trouble = pod_trouble(pod, log, namespace)
    if pod.place is not None:
        return replace(trouble, message=f"{pod.place}: {trouble.message}")
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
    if pod.deleting and pod.place is not None:
        return any(one.restarts for one in pod.containers)  # what all of its group go because of
    return pod.deleting and not pod.ready and bool(log.about("Pod", pod.name, "NodeNotReady"))


def _is_late(body: Mapping[str, Any] | None, pods: Sequence[PodSeen], now: datetime) -> bool:
    """Whether the wanted revision has made no progress for too long; of groups nobody else says so."""
    if body is None or not is_grouped(body):
        return _condition(body, "Progressing", "False", "ProgressDeadlineExceeded") is not None
    return groups_are_late(body, pods, now)


def groups_are_late(body: Mapping[str, Any], pods: Iterable[PodSeen], now: datetime) -> bool:
    """Whether no group of a LeaderWorkerSet got ready for too long while some are to: pods of failed ones are new.

    Args:
        pods: of the groups; those that follow may be ready before an engine is, and do not count.
    """
    longest, waits = progress_s(body), _condition(body, "Progressing", "True")
    if longest is None or waits is None:
        return False
    leaders = (pod for pod in pods if pod.ready and pod.component != "follower")
    moments = [instant(waits.get("lastTransitionTime")), *(pod.turned for pod in leaders)]
    last = max((one for one in moments if one is not None), default=None)
    return last is not None and (now - last).total_seconds() > longest


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
