"""What Kubernetes' own events say about pods that do not run, claims that do not bind, and pods that were not made.

Nothing watches events: they are many and live an hour. They are listed when something is not ready, few objects at a
time, and kept for some seconds, so that services of one namespace share what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from pagefleet_operator.apply.cluster import Body, Cluster
from pagefleet_operator.handlers.seen import timestamp
from pagefleet_operator.plan.engine_sets import LEADER_WORKER_SET
from pagefleet_operator.plan.names import child_stem
from pagefleet_operator.plan.observed import Child, ChildKey, EventSeen, Observed

MAX_PODS = 6
"""Pods of one service whose events are read; others of the same revision fail for the same reason."""
KEPT_S = 5.0
MOST_KEPT = 1000
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_Question = tuple[str, str, str]


class EventReader:
    """Lists events, and remembers answers for a moment."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._answers: dict[_Question, tuple[float, tuple[EventSeen, ...]]] = {}

    async def read(self, namespace: str, service: str, about: Sequence[ChildKey]) -> tuple[EventSeen, ...]:
        """Return what is said about these parts of a service, the oldest first.

        Raises:
            ClusterError: events cannot be listed.
        """
        found: list[EventSeen] = []
        for kind, name in about:
            for event in await self._about((namespace, kind, name)):
                if name or event.name.startswith(f"{child_stem(service)}-"):
                    found.append(event)
        return tuple(sorted(found, key=lambda event: event.last_seen))

    async def _about(self, question: _Question) -> tuple[EventSeen, ...]:
        now = self._clock()
        kept = self._answers.get(question)
        if kept is not None and now - kept[0] < KEPT_S:
            return kept[1]
        answer = tuple(event_seen(body) for body in await self._cluster.list_events(*question))
        if len(self._answers) >= MOST_KEPT:
            self._answers = {key: value for key, value in self._answers.items() if now - value[0] < KEPT_S}
        self._answers[question] = (now, answer)
        return answer


def event_seen(body: Body) -> EventSeen:
    """Return what an event says; both generations of events are read."""
    about = body.get("involvedObject") or body.get("regarding") or {}
    series = body.get("series") or {}
    last = (
        timestamp(series.get("lastObservedTime"))
        or timestamp(body.get("lastTimestamp"))
        or timestamp(body.get("eventTime"))
        or timestamp((body.get("metadata") or {}).get("creationTimestamp"))
    )
    return EventSeen(
        kind=about.get("kind", ""),
        name=about.get("name", ""),
        reason=body.get("reason") or "",
        message=body.get("message") or body.get("note") or "",
        last_seen=last or _LONG_AGO,
    )


def suspects(observed: Observed, claims: Sequence[str]) -> Sequence[ChildKey]:
    """Return what is not as it should be, and so may have events that say why.

    `claims` are those of others that pods mount. An empty name is all of the kind in the namespace.
    """
    waiting = [pod.name for pod in observed.pods if not pod.ready and not pod.deleting and pod.phase != "Succeeded"]
    asked = [("Pod", name) for name in waiting[:MAX_PODS]]
    asked += [("PersistentVolumeClaim", name) for name in claims if waiting]
    for (kind, name), child in observed.children.items():
        status = child.body.get("status") or {}
        unbound = kind == "PersistentVolumeClaim" and status.get("phase") != "Bound"
        idle = kind == "Job" and not status.get("active") and not status.get("succeeded")
        if unbound or idle:
            asked.append((kind, name))
        elif kind == "Deployment" and _lacks_pods(child):
            asked.append(("ReplicaSet", ""))  # their names are not known here; those of one namespace are few
        elif kind == LEADER_WORKER_SET and (waiting or _lacks_pods(child)):
            asked += [(kind, name), ("StatefulSet", name)]
    # What makes the pods that follow is called as their leader.
    leaders = [pod.name for pod in observed.pods if pod.place and pod.place.node == 0 and pod.name in waiting]
    asked += [("StatefulSet", name) for name in leaders[:MAX_PODS]]
    return list(dict.fromkeys(asked))


def _lacks_pods(engines: Child) -> bool:
    wanted = (engines.body.get("spec") or {}).get("replicas", 1)
    return bool((engines.body.get("status") or {}).get("replicas", 0) < wanted)
