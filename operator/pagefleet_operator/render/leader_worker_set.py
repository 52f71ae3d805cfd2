"""Engines over several nodes: a LeaderWorkerSet, of which each group of pods is one engine.

Its controller makes a group's pods, gives them the leader's address and their number, makes all of them anew when one
of them ends, and replaces groups as a whole. Each group has a headless Service of its own, so that none has the name of
the engines' Service.
"""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.engine_sets import (
    GROUP_LABEL,
    LEADER_WORKER_SET,
    LEADER_WORKER_SETS,
    PROGRESS_ANNOTATION,
    RANKS_ANNOTATION,
    SET_LABEL,
)
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.render.engine_deployment import engine_deployment, engine_template
from pagefleet_operator.render.labels import Object, child_object
from pagefleet_operator.render.pod import with_annotations
from pagefleet_operator.render.revision import with_joint_revision
from pagefleet_operator.render.settings import ClusterSettings

_EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
_TOPOLOGY = "pagefleet.dev/exclusive-topology"


def engine_set(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, replicas: int | None
) -> Object:
    """Return what engines are made from: a Deployment, or a LeaderWorkerSet where each is several pods.

    Args:
        replicas: engines; None: another manager scales it, it then has no `replicas`, and so no wish of ours.
    """
    if resolved.nodes == 1:
        return engine_deployment(service, resolved, settings, replicas)
    leader, follower = (engine_template(service, resolved, settings, follows=one) for one in (False, True))
    topology = resolved.profile.spec.exclusive_topology if resolved.profile else None
    # In the templates, too: LeaderWorkerSet puts it on leaders, and would replace all at once if it were no revision.
    marks = {RANKS_ANNOTATION: str(resolved.ranks.per_node)} | ({_TOPOLOGY: topology} if topology else {})
    leader, follower = with_joint_revision([with_annotations(one, marks) for one in (leader, follower)])
    limits = {"maxSurge": resolved.max_surge, "maxUnavailable": resolved.max_unavailable}
    spec: Object = {
        **({"replicas": replicas} if replicas is not None else {}),
        "leaderWorkerTemplate": {
            "size": resolved.nodes,
            "leaderTemplate": leader,
            "workerTemplate": follower,
            # Ranks that lost one of them cannot go on; all begin anew.
            "restartPolicy": "RecreateGroupOnPodRestart",
        },
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": limits},
    }
    kind = f"{LEADER_WORKER_SETS} {LEADER_WORKER_SET}"
    made = child_object(kind, service, names_of(service).engine, "engine", spec=spec)
    notes = {PROGRESS_ANNOTATION: str(service.spec.rollout.progress_seconds)}
    if topology:
        notes[_EXCLUSIVE] = topology
    made["metadata"]["annotations"] = notes
    return made


def group_selector(set_name: str, group: int) -> dict[str, str]:
    """Return what selects all pods of one group."""
    return {SET_LABEL: set_name, GROUP_LABEL: str(group)}
