"""Engines over several nodes: a LeaderWorkerSet, of which each group of pods is one engine.

Its controller makes a group's pods, gives them the leader's address and their number, makes all of them anew when one
of them ends, and replaces groups as a whole. Each group has a headless Service of its own, so that none has the name of
the engines' Service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole

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
    templates = with_joint_revision(engine_templates(service, resolved, settings))
    limits = {"maxSurge": resolved.max_surge, "maxUnavailable": resolved.max_unavailable}
    return group_set(service, resolved, names_of(service).engine, templates, limits, replicas)


def engine_templates(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    role: PairRole | None = None,
    sources: int = 1,
) -> list[Object]:
    """Return the templates of an engine's pods, without their revision: of its leader and, on several nodes, of those
    that follow.

    Args:
        role: of its part of a disaggregated service.
        sources: data ranks of each prefill engine, for a decode engine.
    """
    leader = engine_template(service, resolved, settings, role, sources=sources)
    if resolved.nodes == 1:
        return [leader]
    follower = engine_template(service, resolved, settings, role, follows=True)
    topology = _topology(resolved)
    # In the templates, too: LeaderWorkerSet puts it on leaders, and would replace all at once if it were no revision.
    marks = {RANKS_ANNOTATION: str(resolved.ranks.per_node)} | ({_TOPOLOGY: topology} if topology else {})
    return [with_annotations(one, marks) for one in (leader, follower)]


def group_set(
    service: InferenceService,
    resolved: Resolved,
    name: str,
    templates: Sequence[Mapping[str, Any]],
    limits: Mapping[str, int],
    replicas: int | None,
) -> Object:
    """Return a LeaderWorkerSet.

    Args:
        templates: of leaders, and of those that follow.
        limits: of a rolling update.
        replicas: see `engine_set`.
    """
    leader, follower = templates
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
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": {**limits}},
    }
    kind = f"{LEADER_WORKER_SETS} {LEADER_WORKER_SET}"
    made = child_object(kind, service, name, "engine", spec=spec)
    notes = {PROGRESS_ANNOTATION: str(service.spec.rollout.progress_seconds)}
    if topology := _topology(resolved):
        notes[_EXCLUSIVE] = topology
    made["metadata"]["annotations"] = notes
    return made


def _topology(resolved: Resolved) -> str | None:
    return resolved.profile.spec.exclusive_topology if resolved.profile else None


def group_selector(set_name: str, group: int) -> dict[str, str]:
    """Return what selects all pods of one group."""
    return {SET_LABEL: set_name, GROUP_LABEL: str(group)}
