"""What Kubernetes makes engines from: a Deployment, or a LeaderWorkerSet where each engine is a group of pods.

Of a group's pods, one for each node, the leader is the engine: it serves, is found by routers, and counts. The others
follow it. docs/kubernetes.md says which version of LeaderWorkerSet is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pagefleet_protocol.kube_names import LABEL_REVISION

from pagefleet_operator.plan.observed import Child, ChildKey, GroupPlace, PodSeen

DEPLOYMENT = "Deployment"
LEADER_WORKER_SET = "LeaderWorkerSet"
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"
ENGINE_SETS = (LEADER_WORKER_SET, DEPLOYMENT)
_PREFIX = "leaderworkerset.sigs.k8s.io"
SET_LABEL, GROUP_LABEL, NODE_LABEL = f"{_PREFIX}/name", f"{_PREFIX}/group-index", f"{_PREFIX}/worker-index"
SIZE_ANNOTATION = f"{_PREFIX}/size"
RANKS_ANNOTATION = "pagefleet.dev/ranks"
"""On pods of groups: how many ranks each has."""
PROGRESS_ANNOTATION = "pagefleet.dev/progress-seconds"
"""On a LeaderWorkerSet, which has no such field: as a Deployment's progressDeadlineSeconds."""
LEADER_ADDRESS, NODE_RANK = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"
"""Of variables that the LeaderWorkerSet's controller gives each container."""


def find_set(children: Mapping[ChildKey, Child], name: str, revision: str = "") -> Child | None:
    """Return what makes engines under a name and is ours: of two, while one replaces the other, that of `revision`."""
    found = whole_sets(children, name)
    return next((one for one in found if revision_in(one.body) == revision), found[0] if found else None)


def whole_sets(children: Mapping[ChildKey, Child], name: str) -> list[Child]:
    """Return all that makes engines under a name and is ours: two while one kind replaces the other."""
    return [one for kind in ENGINE_SETS if (one := children.get((kind, name))) and one.ours]


def deployed_replicas(children: Mapping[ChildKey, Child], name: str) -> int | None:
    """Return how many engines are asked for under a name; None: nobody says it, or it is a step of a replacement."""
    found = whole_sets(children, name)
    return replicas_in(found[0].body) if len(found) == 1 else None


def engine_sets(children: Mapping[ChildKey, Child]) -> Iterator[tuple[str, Child]]:
    """Yield every Deployment and LeaderWorkerSet that is ours, by name."""
    for (kind, name), child in sorted(children.items()):
        if kind in ENGINE_SETS and child.ours:
            yield name, child


def template_in(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template of the pods that serve; empty where there is none."""
    spec = body.get("spec") or {}
    found = (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") if is_grouped(body) else spec.get("template")
    return found if isinstance(found, Mapping) else {}


def is_grouped(body: Mapping[str, Any]) -> bool:
    """Return whether each engine is a group of pods."""
    return body.get("kind") == LEADER_WORKER_SET


def revision_in(body: Mapping[str, Any]) -> str:
    """Return the revision of the pods that are made now."""
    found = ((template_in(body).get("metadata") or {}).get("labels") or {}).get(LABEL_REVISION)
    return found if isinstance(found, str) else ""


def replicas_in(body: Mapping[str, Any]) -> int | None:
    """Return how many engines are asked for; None: another manager says it, or nobody."""
    found = (body.get("spec") or {}).get("replicas")
    return found if isinstance(found, int) else None


def surge_in(body: Mapping[str, Any]) -> int:
    """Return how many groups more there may be while one revision replaces another."""
    strategy = (body.get("spec") or {}).get("rolloutStrategy") or {}
    found = (strategy.get("rollingUpdateConfiguration") or {}).get("maxSurge", 0)
    return found if isinstance(found, int) else 0


def progress_s(body: Mapping[str, Any]) -> float | None:
    """Return the seconds after which a revision that makes no progress has failed; None: nobody said."""
    if is_grouped(body):
        text = (body.get("metadata", {}).get("annotations") or {}).get(PROGRESS_ANNOTATION, "")
        return float(text) if str(text).isdigit() else None
    found = (body.get("spec") or {}).get("progressDeadlineSeconds")
    return float(found) if found else None


def groups_seen(pods: Iterable[PodSeen]) -> Mapping[str, int]:
    """Return of each LeaderWorkerSet the highest number of a group that has a pod, plus one."""
    found: dict[str, int] = {}
    for place in (pod.place for pod in pods if pod.place):
        found[place.set_name] = max(found.get(place.set_name, 0), place.group + 1)
    return found


def instant(text: object) -> datetime | None:
    """Return a time of the API server; None: it is none."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def place_of(labels: Mapping[str, str], annotations: Mapping[str, str]) -> GroupPlace | None:
    """Return which pod of which group a pod is; None: it is of none."""
    numbers = (labels.get(GROUP_LABEL, ""), labels.get(NODE_LABEL, ""), annotations.get(SIZE_ANNOTATION, ""))
    if SET_LABEL not in labels or not all(one.isdigit() for one in numbers):
        return None
    group, node, size = map(int, numbers)
    ranks = annotations.get(RANKS_ANNOTATION, "")
    return GroupPlace(labels[SET_LABEL], group, node, size, int(ranks) if ranks.isdigit() else 1)
