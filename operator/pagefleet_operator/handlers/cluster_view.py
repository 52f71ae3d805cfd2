"""All that the watches have told and not taken back, by the InferenceService that it belongs to.

Plain dicts of compact values. kopf's own indexes cannot forget what was deleted while a watch was broken, and do not
know which InferenceService a change matters to; these do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.kube_names import FIELD_MANAGER, LABEL_MANAGED_BY, LABEL_SERVICE
from pagefleet_protocol.resource_documents import parse_inference_profile

from pagefleet_operator.apply.kinds import INFERENCE_PROFILE, INFERENCE_SERVICE, POD, Kind
from pagefleet_operator.handlers.seen import StoredChild, pod_seen, stored_child
from pagefleet_operator.plan.observed import Child, ChildKey, PodSeen

Key = tuple[str, str]
"""Namespace and name of an InferenceService."""
_METADATA = ("name", "namespace", "labels", "annotations", "uid", "generation")
_OF_LISTED = "kubectl.kubernetes.io/last-applied-configuration"
"""An annotation as large as the object itself, which nothing reads."""


@dataclass(frozen=True, slots=True)
class StoredService:
    """An InferenceService as it is kept between two looks."""

    uid: str
    generation: int
    deleting: bool
    document: bytes
    """JSON of apiVersion, kind, trimmed metadata and spec."""
    status: bytes
    """JSON of its status as it was last seen."""


class ClusterView:
    """Filled by the watches, read by reconciles. Every method returns at once."""

    def __init__(self) -> None:
        self.profiles: dict[str, InferenceProfile] = {}
        self.invalid_profiles: dict[str, str] = {}
        self._services: dict[Key, StoredService] = {}
        self._children: dict[Key, dict[ChildKey, StoredChild]] = {}
        self._pods: dict[Key, dict[str, PodSeen]] = {}
        self._versions: dict[str, dict[Key, tuple[str, str, Key]]] = {}
        # By kind, then namespace and name: uid, version, and the InferenceService it belongs to.

    def note(self, kind: Kind, body: Mapping[str, Any], deleted: bool = False) -> Collection[Key]:
        """Take in one object; returns the InferenceServices to look at, none when nothing that matters changed."""
        metadata: Mapping[str, Any] = body["metadata"]
        own = (metadata.get("namespace") or "", metadata["name"])
        if deleted:
            return self._forget(kind, own, metadata.get("uid", ""))
        service = (own[0], (metadata.get("labels") or {}).get(LABEL_SERVICE, ""))
        if kind not in (INFERENCE_SERVICE, INFERENCE_PROFILE) and not service[1]:
            return ()
        owner = own if kind in (INFERENCE_SERVICE, INFERENCE_PROFILE) else service
        versions = self._versions.setdefault(kind.kind, {})
        before = versions.get(own)
        versions[own] = (metadata.get("uid", ""), metadata.get("resourceVersion", ""), owner)
        moved = self._drop(kind, own, before[2]) if before is not None and before[2] != owner else ()
        return (*self._store(kind, own, owner, body), *moved)

    def keep_only(self, kind: Kind, namespace: str, uids: Mapping[Key, str]) -> Collection[Key]:
        """Forget objects of a kind that exist no more: those without their uid here. `namespace` empty: of all."""
        known = self._versions.get(kind.kind, {})
        gone = [own for own, (uid, _, _) in known.items() if namespace in ("", own[0]) and uids.get(own) != uid]
        return {key for own in gone for key in self._forget(kind, own, known[own][0])}

    def version(self, kind: Kind, own: Key) -> str:
        """Return the resourceVersion at which an object was last seen; empty for never."""
        found = self._versions.get(kind.kind, {}).get(own)
        return found[1] if found else ""

    def seen(self, kind: Kind) -> Mapping[Key, tuple[str, str, Key]]:
        """Return uid, version and owner of every object of a kind."""
        return self._versions.get(kind.kind, {})

    def services(self) -> Iterator[Key]:
        yield from tuple(self._services)

    def service(self, key: Key) -> StoredService | None:
        return self._services.get(key)

    def children(self, key: Key, uid: str, *kinds: str) -> dict[ChildKey, Child]:
        """Return what belongs to an InferenceService by its label; `uid` tells which of it is its own.

        `kinds` are for those of some kinds alone: each is parsed anew.
        """
        found = self._children.get(key, {})
        return {name: child.open(uid) for name, child in found.items() if not kinds or name[0] in kinds}

    def child(self, key: Key, uid: str, name: ChildKey) -> Child | None:
        """Return one of them; None: there is none."""
        found = self._children.get(key, {}).get(name)
        return found.open(uid) if found is not None else None

    def pods(self, key: Key) -> tuple[PodSeen, ...]:
        return tuple(pod for _, pod in sorted(self._pods.get(key, {}).items()))

    def _store(self, kind: Kind, own: Key, owner: Key, body: Mapping[str, Any]) -> Collection[Key]:
        if kind == INFERENCE_SERVICE:
            return self._store_service(own, body)
        if kind == INFERENCE_PROFILE:
            return self._store_profile(own[1], body)
        if kind == POD:
            pod = pod_seen(body)
            pods = self._pods.setdefault(owner, {})
            if pod is None or pods.get(pod.name) == pod:
                return ()
            pods[pod.name] = pod
            return (owner,)
        child = stored_child(body, kind.kind, kind.api_version)
        children = self._children.setdefault(owner, {})
        if children.get((kind.kind, own[1])) == child:
            return ()
        children[kind.kind, own[1]] = child
        return (owner,)

    def _store_service(self, own: Key, body: Mapping[str, Any]) -> Collection[Key]:
        metadata = {name: body["metadata"][name] for name in _METADATA if name in body["metadata"]}
        if _OF_LISTED in (metadata.get("annotations") or {}):
            annotations: Mapping[str, str] = metadata["annotations"]
            metadata["annotations"] = {name: text for name, text in annotations.items() if name != _OF_LISTED}
        document = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "metadata": metadata,
            **({"spec": body["spec"]} if "spec" in body else {}),
        }
        stored = StoredService(
            uid=metadata.get("uid", ""),
            generation=metadata.get("generation", 1),
            deleting="deletionTimestamp" in body["metadata"],
            document=msgspec.json.encode(document),
            status=msgspec.json.encode(body.get("status") or {}),
        )
        before = self._services.get(own)
        self._services[own] = stored
        if before is not None and (before.document, before.deleting) == (stored.document, stored.deleting):
            return ()  # a status, most likely ours; another's is put right by the next resync
        return (own,)

    def _store_profile(self, name: str, body: Mapping[str, Any]) -> Collection[Key]:
        metadata = {"name": name}
        document = {"apiVersion": INFERENCE_PROFILE.api_version, "kind": INFERENCE_PROFILE.kind, "metadata": metadata}
        before = (self.profiles.pop(name, None), self.invalid_profiles.pop(name, None))
        try:
            self.profiles[name] = parse_inference_profile({**document, "spec": body.get("spec") or {}})
        except InvalidDocument as error:
            self.invalid_profiles[name] = str(error)
        if before == (self.profiles.get(name), self.invalid_profiles.get(name)):
            return ()
        return tuple(self._services)  # whoever uses it, by name or by its type of GPU

    def _forget(self, kind: Kind, own: Key, uid: str) -> Collection[Key]:
        known = self._versions.get(kind.kind, {}).get(own)
        if known is None or (uid and known[0] != uid):
            return ()  # told late: another object has the name by now
        del self._versions[kind.kind][own]
        return self._drop(kind, own, known[2])

    def _drop(self, kind: Kind, own: Key, owner: Key) -> Collection[Key]:
        if kind == INFERENCE_SERVICE:
            self._services.pop(own, None)
            return (own,)
        if kind == INFERENCE_PROFILE:
            self.profiles.pop(own[1], None)
            self.invalid_profiles.pop(own[1], None)
            return tuple(self._services)
        if kind == POD:
            _remove(self._pods, owner, own[1])
        else:
            _remove(self._children, owner, (kind.kind, own[1]))
        return (owner,)


def managed_selector(kind: Kind) -> str:
    """Return the label selector under which objects of a kind are watched; empty: all of them."""
    return "" if kind in (INFERENCE_SERVICE, INFERENCE_PROFILE) else f"{LABEL_MANAGED_BY}={FIELD_MANAGER}"


def _remove(by_owner: dict[Key, dict[Any, Any]], owner: Key, name: object) -> None:
    entries = by_owner.get(owner, {})
    entries.pop(name, None)
    if not entries:
        by_owner.pop(owner, None)
