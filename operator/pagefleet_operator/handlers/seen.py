"""Pods and children as they are kept between two looks: compact, and what only managedFields tell read out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

import msgspec
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.kube_names import FIELD_MANAGER, LABEL_COMPONENT, LABEL_REVISION, LABEL_ROLE

from pagefleet_operator.plan.engine_sets import ENGINE_SETS, place_of
from pagefleet_operator.plan.observed import Child, Component, ContainerSeen, PodSeen
from pagefleet_operator.plan.roles import PAIR_ROLES

_NOISE = frozenset({"managedFields", "resourceVersion"})
"""Of the metadata: changes whenever anything changes, so that two equal objects would not look equal."""


@dataclass(frozen=True, slots=True)
class StoredChild:
    """One object, as JSON: a dict of it takes ten times the memory."""

    uid: str
    owner: str
    """Uid of its controller; empty for none."""
    scaled_by: str
    data: bytes

    def open(self, service_uid: str) -> Child:
        return Child(body=msgspec.json.decode(self.data), ours=self.owner == service_uid, scaled_by=self.scaled_by)


def stored_child(body: Mapping[str, Any], kind: str, api_version: str) -> StoredChild:
    """Make the compact form. Lists of objects leave out kind and version, so they are told."""
    metadata: Mapping[str, Any] = body["metadata"]
    kept = {
        **body,
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {name: value for name, value in metadata.items() if name not in _NOISE},
    }
    return StoredChild(
        uid=metadata.get("uid", ""),
        owner=controller_of(metadata),
        scaled_by=_scaled_by(metadata) if kind in ENGINE_SETS else "",
        data=msgspec.json.encode(kept),
    )


def controller_of(metadata: Mapping[str, Any]) -> str:
    """Return the uid of the object's controller; empty for none."""
    owners = metadata.get("ownerReferences") or ()
    return next((str(one["uid"]) for one in owners if one.get("controller")), "")


def _scaled_by(metadata: Mapping[str, Any]) -> str:
    for entry in metadata.get("managedFields") or ():
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        manager = str(entry.get("manager", ""))
        if entry.get("subresource") == "scale" and "f:replicas" in fields and is_autoscaler(manager):
            return manager
    return ""


_BY_HAND = ("kubectl", "k9s", "lens")
"""How programs call themselves that do what a person tells them; they are to scale the InferenceService."""


def is_autoscaler(manager: str) -> bool:
    """Whether a manager of a Deployment's scale subresource decides by itself, as a HorizontalPodAutoscaler's does."""
    return manager != FIELD_MANAGER and not manager.lower().startswith(_BY_HAND)


_COMPONENTS: Mapping[str, Component] = {name: name for name in get_args(Component)}

_ROLES: Mapping[str, PairRole] = {name: name for name in PAIR_ROLES}


def pod_seen(body: Mapping[str, Any]) -> PodSeen | None:
    """Return the pod; None: it is no engine, router or model job."""
    metadata: Mapping[str, Any] = body["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    status: Mapping[str, Any] = body.get("status") or {}
    component = _COMPONENTS.get(labels.get(LABEL_COMPONENT, ""))
    if component is None:
        return None
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    waits = scheduled.get("status") == "False" and scheduled.get("reason") in ("Unschedulable", "SchedulingGated")
    return PodSeen(
        name=metadata["name"],
        component=component,
        revision=labels.get(LABEL_REVISION, ""),
        uid=metadata.get("uid", ""),
        phase=status.get("phase", "Pending"),
        ready=ready.get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        node=(body.get("spec") or {}).get("nodeName", ""),
        ip=status.get("podIP", ""),
        role=_ROLES.get(labels.get(LABEL_ROLE, "")),
        place=place_of(labels, metadata.get("annotations") or {}),
        created=timestamp(metadata.get("creationTimestamp")),
        turned=timestamp(ready.get("lastTransitionTime")),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        unschedulable=(scheduled.get("message") or scheduled["reason"]) if waits else "",
        containers=tuple(_containers(status)),
    )


def timestamp(text: str | None) -> datetime | None:
    """Parse a time of the API server; None: there is none, or it is not one."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def _containers(status: Mapping[str, Any]) -> Iterator[ContainerSeen]:
    for init, key in ((True, "initContainerStatuses"), (False, "containerStatuses")):
        for one in status.get(key) or ():
            yield _container(one, init)


def _container(status: Mapping[str, Any], init: bool) -> ContainerSeen:
    now: Mapping[str, Any] = status.get("state") or {}
    before: Mapping[str, Any] = (status.get("lastState") or {}).get("terminated") or {}
    ended: Mapping[str, Any] = now.get("terminated") or {}
    said: Mapping[str, Any] = ended or now.get("waiting") or {}
    return ContainerSeen(
        name=status["name"],
        init=init,
        state="terminated" if "terminated" in now else "running" if "running" in now else "waiting",
        reason=said.get("reason", ""),
        message=said.get("message", ""),
        exit_code=ended.get("exitCode"),
        restarts=status.get("restartCount", 0),
        last_reason=before.get("reason", ""),
        last_message=before.get("message", ""),
        last_exit_code=before.get("exitCode"),
    )
