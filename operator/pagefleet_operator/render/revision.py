"""Hashes: of a pod template, so that pods tell which one they were made from, and of a child as it is wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagefleet_protocol.kube_names import ANNOTATION_APPLIED, LABEL_COMPONENT, LABEL_REVISION, LABEL_ROLE

from pagefleet_operator.plan.engine_sets import (
    DEPLOYMENT,
    ENGINE_SETS,
    LEADER_WORKER_SET,
    LEADER_WORKER_SETS,
    is_grouped,
    template_in,
)
from pagefleet_operator.render.labels import Object

REVISION_LENGTH = 10
_APPLIED_LENGTH = 16


def digest(value: object, length: int = REVISION_LENGTH) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a value made of dicts, lists and scalars."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def with_revision(template: Mapping[str, Any]) -> Object:
    """Return a pod template with the label that tells all others from it; the label itself is not counted."""
    metadata = dict(template.get("metadata", {}))
    labels = {name: value for name, value in metadata.get("labels", {}).items() if name != LABEL_REVISION}
    bare = {**template, "metadata": {**metadata, "labels": labels}}
    return {**bare, "metadata": {**metadata, "labels": labels | {LABEL_REVISION: digest(bare)}}}


def with_joint_revision(templates: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Return templates of pods that are replaced together, each with the label that tells all of them from others."""
    joint = {LABEL_REVISION: digest([with_revision(one) for one in templates])}
    return [
        {**one, "metadata": {**one["metadata"], "labels": {**one["metadata"]["labels"], **joint}}} for one in templates
    ]


def with_applied(child: Object) -> Object:
    """Return a child with the hash of what is wanted of it.

    Server-side apply takes away what was wanted before and no more is, but only when something is applied. What is
    missing from the wanted object shows in no comparison; the hash does.
    """
    annotations = {**child["metadata"].get("annotations", {}), ANNOTATION_APPLIED: digest(child, _APPLIED_LENGTH)}
    return {**child, "metadata": {**child["metadata"], "annotations": annotations}}


def revision_of(children: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the revision of the pods that serve, of what makes them among `children`, by component: engine, router.

    Of two kinds of engines, while one replaces the other, the first counts, which is the wanted one. Parts of a
    disaggregated service have Deployments of several revisions, and are left out.
    """
    found: dict[str, str] = {}
    for child in children:
        if child.get("kind") in ENGINE_SETS:
            pod_labels = template_in(child)["metadata"]["labels"]
            if LABEL_ROLE not in pod_labels:
                found.setdefault(pod_labels[LABEL_COMPONENT], pod_labels.get(LABEL_REVISION, ""))
    return found


_SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")


def as_seen(body: Mapping[str, Any], api_version: str, kind: str) -> Object:
    """Return an object as the API server has it, without what only the API server may say.

    Items of lists come from it without the two fields that say what they are.
    """
    metadata = {name: value for name, value in body["metadata"].items() if name not in _SET_BY_SERVER}
    kept = {name: value for name, value in body.items() if name != "status"}
    return {**kept, "apiVersion": api_version, "kind": kind, "metadata": metadata}


def as_found(engines: Mapping[str, Any]) -> Object:
    """Return a Deployment or LeaderWorkerSet as the API server has it."""
    if is_grouped(engines):
        return as_seen(engines, LEADER_WORKER_SETS, LEADER_WORKER_SET)
    return as_seen(engines, "apps/v1", DEPLOYMENT)


def as_scaled(engines: Mapping[str, Any], replicas: int) -> Object:
    """Return a Deployment or LeaderWorkerSet as the API server has it, but for its number of engines."""
    body = as_found(engines)
    return {**body, "spec": {**body["spec"], "replicas": replicas}}
