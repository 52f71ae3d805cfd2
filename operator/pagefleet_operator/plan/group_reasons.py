"""What keeps groups of pods from being engines, beside what their pods say: those that do not come, or went."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pagefleet_operator.plan.engine_sets import instant, replicas_in
from pagefleet_operator.plan.observed import GroupPlace, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog, refused_pods
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Trouble, quoted

_COMES_WITHIN = timedelta(seconds=30)
"""So soon after what makes it, a pod is there."""
_COMES_BACK_WITHIN = timedelta(minutes=2)
"""A leader that is made later than this was made for another reason: a new revision, another number of engines."""
_ANEW = "RecreateGroup"
"""Event of a LeaderWorkerSet whose group lost a pod, and so all of them."""
_ANEW_LEADER = re.compile(r"deleted leader pod (\S+) to recreate")


def group_troubles(body: Mapping[str, Any], pods: Sequence[PodSeen], log: EventLog, now: datetime) -> Iterator[Trouble]:
    """Yield what is wrong with the groups of a LeaderWorkerSet that no pod of theirs tells.

    Args:
        pods: of the service's engines, without those that go.
    """
    name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "default")
    mine = [(pod, pod.place) for pod in pods if pod.place and pod.place.set_name == name]
    leaders = [(pod, place) for pod, place in mine if place.node == 0]
    wanted = replicas_in(body) or 0
    if len(leaders) < wanted and (refused := _refused(name, log)):
        yield refused
    made = instant(body["metadata"].get("creationTimestamp"))
    if wanted and not body.get("status") and made is not None and now - made > _COMES_WITHIN:
        remedy = "Look for its controller: kubectl -n lws-system get pods"
        yield Trouble(Reason.NOT_READY, f"nobody makes pods of LeaderWorkerSet {name}. {remedy}")
    for leader, place in leaders:
        have = {other.node for _, other in mine if other.group == place.group}
        yield from _missing(leader, place, have, log, (namespace, now))
    yield from _made_anew(name, mine, log, (namespace, now))


def _missing(
    leader: PodSeen, place: GroupPlace, have: set[int], log: EventLog, where: tuple[str, datetime]
) -> Iterator[Trouble]:
    """Yield why pods of a group do not come; those that follow are made by what is called as their leader."""
    namespace, now = where
    absent = sorted(set(range(place.nodes)) - have)
    # Where a group has a topology for itself, its pods come once the leader has a node.
    if not absent or not leader.node or (leader.created and now - leader.created <= _COMES_WITHIN):
        return
    told = _refused(leader.name, log)
    missing = GroupPlace(place.set_name, place.group, absent[0], place.nodes, place.ranks)
    more = f" (nor have {len(absent) - 1} more)" if len(absent) > 1 else ""
    remedy = f"kubectl -n {namespace} describe statefulset {leader.name}"
    yield Trouble(
        told.reason if told else Reason.NOT_READY,
        f"{missing} has no pod{more}: {told.message}" if told else f"{missing} has no pod{more}. See {remedy}",
    )


def _refused(stateful_set: str, log: EventLog) -> Trouble | None:
    messages = [one.message for one in log.about("StatefulSet", stateful_set, "FailedCreate")]
    return refused_pods(stateful_set, [text.partition(" failed error: ")[2] or text for text in messages])


def _made_anew(
    name: str, mine: Sequence[tuple[PodSeen, GroupPlace]], log: EventLog, where: tuple[str, datetime]
) -> Iterator[Trouble]:
    """Yield that a group is on its way again: the pod that failed is gone, and with it what it said."""
    namespace, now = where
    waiting = {place.group for pod, place in mine if not pod.ready}
    leaders = {pod.name: (pod, place.group) for pod, place in mine if place.node == 0}
    for event in log.about("LeaderWorkerSet", name, _ANEW):
        found = _ANEW_LEADER.search(event.message)
        leader, group = leaders.get(found[1] if found else "", (None, None))
        since = leader.created if leader and leader.created else now
        if (leader is None or group in waiting) and since - event.last_seen < _COMES_BACK_WITHIN:
            remedy = f"While it runs: kubectl -n {namespace} logs -f -l leaderworkerset.sigs.k8s.io/name={name}"
            yield Trouble(Reason.CRASH_LOOP, f"a group was made anew: {quoted(event.message)}. {remedy}")
            return
