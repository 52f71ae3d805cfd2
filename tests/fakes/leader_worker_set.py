"""What LeaderWorkerSet's controller decides, as far as pagefleet relies on it: which pods to make, and which to delete.

Pure: an object, its pods and Services as the API server has them go in, decisions come out. After LeaderWorkerSet v0.10
(`leaderworkerset.x-k8s.io/v1`), with one difference: what it leaves to StatefulSets (a leader's pod, and those that
follow it) is decided here. Names, labels, annotations, variables, the order of a rolling update and the restart of
whole groups are as there. No test in here.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
PREFIX = "leaderworkerset.sigs.k8s.io"
NAME, GROUP, NODE, KEY = (f"{PREFIX}/{one}" for one in ("name", "group-index", "worker-index", "group-key"))
REVISION, SIZE = f"{PREFIX}/template-revision-hash", f"{PREFIX}/size"
LEADER_NAME, LEADER_UID = f"{PREFIX}/leader-name", f"{PREFIX}/leader-uid"
"""The second stands for the chain of owners: of a pod that follows, its StatefulSet, and of that the leader."""
EXCLUSIVE = f"{PREFIX}/exclusive-topology"
API_VERSION = "leaderworkerset.x-k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Decisions:
    """What is to be done now; when nothing is seen to change, nothing is left to do."""

    create: tuple[Body, ...] = ()
    """Pods and headless Services."""
    delete: tuple[str, ...] = ()
    """Names of pods."""
    events: tuple[tuple[str, str], ...] = ()
    """Reason and message, about the LeaderWorkerSet."""
    status: Body = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Group:
    number: int
    leader: Body | None
    followers: tuple[Body, ...]

    def is_ready(self, size: int) -> bool:
        pods = (*((self.leader,) if self.leader else ()), *self.followers)
        return len(pods) == size and all(_is_ready(pod) and not _is_going(pod) for pod in pods)

    @property
    def revision(self) -> str:
        return str(self.leader["metadata"]["labels"][REVISION]) if self.leader else ""

    @property
    def waits(self) -> bool:
        """Whether its leader is about to go: nothing is made for it until then."""
        return self.leader is not None and _is_going(self.leader)


def decide(made: Body, pods: Iterable[Body], services: Iterable[str], now: str) -> Decisions:
    """Return what to do about one LeaderWorkerSet.

    Args:
        made: the LeaderWorkerSet.
        pods: of its namespace, those of others among them.
        services: names of the namespace's Services.
        now: RFC 3339, for conditions that change.
    """
    name, spec = made["metadata"]["name"], made["spec"]
    size = spec["leaderWorkerTemplate"].get("size", 1)
    mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get(NAME) == name]
    groups = _groups(mine)
    anew, events = _made_anew(groups.values()) if _restarts_groups(spec) else ([], [])
    wanted, revision = _wanted_groups(made, groups), revision_of(made)
    replaced = _replaced(made, groups, revision, anew)
    leaders = [
        leader_pod(made, number)
        for number in range(wanted)
        if number not in groups or (groups[number].leader is None and not any(groups[number].followers))
    ]
    going = [pod["metadata"]["name"] for number, group in groups.items() if number >= wanted for pod in _leader(group)]
    create = [*leaders, *_followers(made, groups, anew), *_services(made, groups, services)]
    return Decisions(
        create=tuple(create),
        delete=tuple(dict.fromkeys((*anew, *replaced, *going, *_orphans(groups)))),
        events=tuple(events),
        status=_status(made, groups, (size, revision, now)),
    )


def revision_of(made: Body) -> str:
    """Return what tells pods of one template from those of another."""
    text = json.dumps([made["spec"]["leaderWorkerTemplate"], made["spec"].get("networkConfig")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def leader_pod(made: Body, number: int) -> Body:
    """Return the pod that leads a group, as it is when the webhooks have seen it."""
    template = made["spec"]["leaderWorkerTemplate"]
    name = f"{made['metadata']['name']}-{number}"
    return _pod(made, template.get("leaderTemplate") or template["workerTemplate"], name, (number, 0), {})


def follower_pod(made: Body, leader: Body, node: int) -> Body:
    """Return a pod that follows, of the leader's group."""
    metadata = leader["metadata"]
    of_leader = {LEADER_NAME: metadata["name"], LEADER_UID: metadata.get("uid", "")}
    template = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    number = int(metadata["labels"][GROUP])
    pod = _pod(made, template, f"{metadata['name']}-{node}", (number, node), of_leader)
    pod["metadata"]["labels"][REVISION] = metadata["labels"][REVISION]
    return pod


def _pod(made: Body, template: Body, name: str, place: tuple[int, int], notes: Mapping[str, str]) -> Body:
    own, spec = made["metadata"], copy.deepcopy(template["spec"])
    number, node = place
    first = f"{own['name']}-{number}"
    size = made["spec"]["leaderWorkerTemplate"].get("size", 1)
    spec |= {"hostname": name, "subdomain": first if _has_own_services(made) else own["name"]}
    variables = [
        {"name": "LWS_LEADER_ADDRESS", "value": f"{first}.{spec['subdomain']}.{own['namespace']}"},
        {"name": "LWS_GROUP_SIZE", "value": str(size)},
        {"name": "LWS_WORKER_INDEX", "value": str(node)},
    ]
    names = {one["name"] for one in variables}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        # First: Kubernetes expands $(NAME) by what stands before.
        container["env"] = [*variables, *(one for one in container.get("env", ()) if one["name"] not in names)]
    key = hashlib.sha1(f"{own['namespace']}/{first}".encode()).hexdigest()
    exclusive = own.get("annotations", {}).get(EXCLUSIVE)
    if exclusive and node == 0:
        spec["affinity"] = {**spec.get("affinity", {}), **_exclusive(exclusive, key)}
    marks = {NAME: own["name"], GROUP: str(number), NODE: str(node), KEY: key, REVISION: revision_of(made)}
    metadata = copy.deepcopy(template.get("metadata", {}))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": own["namespace"],
            "labels": {**metadata.get("labels", {}), **marks},
            "annotations": {**metadata.get("annotations", {}), SIZE: str(size), **notes},
            "ownerReferences": [_owner(made)],
        },
        "spec": spec,
    }


def _exclusive(topology: str, key: str) -> Body:
    own = {"key": KEY, "operator": "In", "values": [key]}
    others = [{"key": KEY, "operator": "Exists"}, {"key": KEY, "operator": "NotIn", "values": [key]}]
    terms = {"podAffinity": [own], "podAntiAffinity": others}
    return {
        kind: {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchExpressions": rules}, "topologyKey": topology}
            ]
        }
        for kind, rules in terms.items()
    }


def _owner(made: Body) -> Body:
    return {
        "apiVersion": API_VERSION,
        "kind": "LeaderWorkerSet",
        "name": made["metadata"]["name"],
        "uid": made["metadata"].get("uid", ""),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _groups(pods: Sequence[Body]) -> dict[int, _Group]:
    found: dict[int, list[Body]] = {}
    for pod in pods:
        found.setdefault(int(pod["metadata"]["labels"][GROUP]), []).append(pod)
    return {
        number: _Group(
            number,
            next((pod for pod in those if _node(pod) == 0), None),
            tuple(pod for pod in those if _node(pod)),
        )
        for number, those in sorted(found.items())
    }


def _made_anew(groups: Iterable[_Group]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the pods of groups of which one pod, or a container of one, has ended: all of them, at once."""
    names, events = [], []
    for group in groups:
        leader = group.leader
        if leader is None:
            continue
        own = [pod for pod in group.followers if _follows(pod, leader)]
        broken = next((pod for pod in (leader, *own) if _has_restarted(pod) or _is_going(pod)), None)
        if broken is None or (_is_going(leader) and not any(map(_has_restarted, (leader, *own)))):
            continue  # a leader that is told to go finishes what it has, and those that follow stay for so long
        names += [pod["metadata"]["name"] for pod in (leader, *own)]
        if not _is_going(leader):
            first, name = leader["metadata"]["name"], broken["metadata"]["name"]
            text = f"Worker pod {name} failed, deleted leader pod {first} to recreate group {group.number}"
            events.append(("RecreateGroup", text))
    return names, events


def _wanted_groups(made: Body, groups: Mapping[int, _Group]) -> int:
    """Return how many groups there are to be now: some more than asked for while one revision replaces another."""
    replicas, size = made["spec"].get("replicas", 1), made["spec"]["leaderWorkerTemplate"].get("size", 1)
    revision = revision_of(made)
    lasting = [groups[number] for number in range(replicas) if number in groups]
    rolls = any(group.revision not in ("", revision) for group in lasting) or any(one >= replicas for one in groups)
    done = [group for group in lasting if group.revision == revision and group.is_ready(size)]
    if not rolls or len(done) == replicas:
        return int(replicas)
    return int(replicas) + min(_limit(made, "maxSurge", 0), int(replicas))


def _replaced(made: Body, groups: Mapping[int, _Group], revision: str, anew: Sequence[str]) -> Iterator[str]:
    """Yield the leaders of groups of an older revision that may go now, the highest number first."""
    replicas, size = made["spec"].get("replicas", 1), made["spec"]["leaderWorkerTemplate"].get("size", 1)
    ready = sum(group.is_ready(size) for group in groups.values())
    spare = ready - (replicas - _limit(made, "maxUnavailable", 1))
    for group in sorted(groups.values(), key=lambda one: -one.number):
        leader = group.leader
        if leader is None or group.waits or group.revision == revision or leader["metadata"]["name"] in anew:
            continue
        if not group.is_ready(size):
            yield leader["metadata"]["name"]
        elif spare > 0:
            spare -= 1
            yield leader["metadata"]["name"]


def _followers(made: Body, groups: Mapping[int, _Group], anew: Sequence[str]) -> Iterator[Body]:
    size = made["spec"]["leaderWorkerTemplate"].get("size", 1)
    exclusive = EXCLUSIVE in made["metadata"].get("annotations", {})
    for group in groups.values():
        leader = group.leader
        if leader is None or group.waits or leader["metadata"]["name"] in anew or group.revision != revision_of(made):
            continue
        if exclusive and not leader["spec"].get("nodeName"):
            continue
        have = {_node(pod) for pod in group.followers}
        yield from (follower_pod(made, leader, node) for node in range(1, size) if node not in have)


def _orphans(groups: Mapping[int, _Group]) -> Iterator[str]:
    """Yield pods whose leader is gone, as garbage collection would find them."""
    for group in groups.values():
        for pod in group.followers:
            if (group.leader is None or not _follows(pod, group.leader)) and not _is_going(pod):
                yield pod["metadata"]["name"]


def _services(made: Body, groups: Mapping[int, _Group], known: Iterable[str]) -> Iterator[Body]:
    """Yield the headless Services by which pods of a group find their leader, of those that are missing."""
    have, own = set(known), made["metadata"]
    if not _has_own_services(made):
        if own["name"] not in have:
            yield _service(made, own["name"], {NAME: own["name"]}, _owner(made))
        return
    for group in groups.values():
        for leader in _leader(group):
            name = leader["metadata"]["name"]
            if name not in have and not group.waits:
                owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": leader["metadata"].get("uid", "")}
                yield _service(made, name, {NAME: own["name"], GROUP: str(group.number)}, owner)


def _service(made: Body, name: str, match: Mapping[str, str], owner: Body) -> Body:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": made["metadata"]["namespace"], "ownerReferences": [owner]},
        "spec": {"clusterIP": "None", "selector": dict(match), "publishNotReadyAddresses": True},
    }


def _status(made: Body, groups: Mapping[int, _Group], known: tuple[int, str, str]) -> Body:
    size, revision, now = known
    replicas, name = made["spec"].get("replicas", 1), made["metadata"]["name"]
    lasting = [group for group in groups.values() if group.number < replicas]
    ready = [group for group in groups.values() if group.is_ready(size)]
    updated = [group for group in groups.values() if group.leader and group.revision == revision]
    done = sum(group in updated for group in lasting)
    if done < sum(group.leader is not None for group in lasting):
        kinds = ["UpdateInProgress", "Progressing"]
    elif len(lasting) == replicas and all(group in ready for group in lasting):
        kinds = ["Available"]
    else:
        kinds = ["Progressing"]
    return {
        "observedGeneration": made["metadata"].get("generation", 1),
        "replicas": sum(group.leader is not None for group in groups.values()),
        "readyReplicas": len(ready),
        "updatedReplicas": len(updated),
        "hpaPodSelector": f"{NAME}={name},{NODE}=0",
        "conditions": _conditions(made.get("status") or {}, kinds, now),
    }


def _conditions(before: Body, kinds: Sequence[str], now: str) -> list[Body]:
    since = {(one["type"], one["status"]): one["lastTransitionTime"] for one in before.get("conditions") or ()}
    states = {kind: "True" if kind in kinds else "False" for kind in ("Available", "Progressing", "UpdateInProgress")}
    return [
        {
            "type": kind,
            "status": state,
            "reason": kind,
            "message": "",
            "lastTransitionTime": since.get((kind, state), now),
        }
        for kind, state in states.items()
    ]


def _restarts_groups(spec: Body) -> bool:
    return bool(spec["leaderWorkerTemplate"].get("restartPolicy", "") in ("", "RecreateGroupOnPodRestart"))


def _has_own_services(made: Body) -> bool:
    return bool((made["spec"].get("networkConfig") or {}).get("subdomainPolicy") == "UniquePerReplica")


def _limit(made: Body, name: str, default: int) -> int:
    """Return a limit of the rollout; percentages nobody here writes."""
    limits = (made["spec"].get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return int(limits.get(name, default))


def _leader(group: _Group) -> tuple[Body, ...]:
    return (group.leader,) if group.leader is not None and not group.waits else ()


def _follows(pod: Body, leader: Body) -> bool:
    return bool(pod["metadata"]["annotations"].get(LEADER_UID) == leader["metadata"].get("uid", ""))


def _node(pod: Body) -> int:
    return int(pod["metadata"]["labels"][NODE])


def _is_going(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _has_restarted(pod: Body) -> bool:
    status = pod.get("status") or {}
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return status.get("phase") in ("Running", "Pending") and any(one.get("restartCount") for one in containers)
