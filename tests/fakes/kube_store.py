"""The objects of an emulated API server: versions, ownership of fields, deletion. No HTTP and no test in here.

Not emulated: schemas with their defaults and rules, quotas, controllers. What needs them is tested against a real API
server. Owners do take what they own along.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec

from tests.fakes.kube_fields import Fields, fields_v1, leaves, merged, owned_fields, value_at, without
from tests.fakes.kube_kinds import NAMESPACE, Kind

Document = dict[str, Any]
T = TypeVar("T")
ObjectKey = tuple[Kind, str | None, str]
KEPT_CHANGES = 20_000


class Refused(Exception):
    """What the API server answers instead of doing it: HTTP status, reason, message, and further headers."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch; `before` is the object as it was, for selectors that no longer match."""

    version: int
    type: str
    kind: Kind
    document: Document
    before: Document | None


@dataclass(slots=True)
class Entry:
    """A stored object, and who owns which of its fields: (manager, operation, subresource) to fields."""

    document: Document
    owners: dict[tuple[str, str, str], Fields] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Write:
    """Who writes and how."""

    manager: str = "test"
    subresource: str = ""
    force: bool = True
    content_type: str = "application/merge-patch+json"


class Store:
    """All objects. Every method raises Refused as the API server would refuse."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._entries: dict[ObjectKey, Entry] = {}
        self._uids = itertools.count(1)
        self.version = 1
        self.compacted = 0  # watches from before this version are told that it is gone
        self.changes: deque[Change] = deque()
        self.listeners: list[Callable[[Change], None]] = []

    def get(self, kind: Kind, namespace: str | None, name: str) -> Document:
        """Return a copy of one object."""
        return copied(self._entry(kind, namespace, name).document)

    def find(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        """Return a copy of one object, or None."""
        entry = self._entries.get((kind, namespace, name))
        return copied(entry.document) if entry else None

    def all_of(self, kind: Kind, namespace: str | None = None) -> Iterator[Document]:
        """Yield the objects of a kind, in one namespace or in all; they must not be changed."""
        for (of, where, _), entry in self._entries.items():
            if of == kind and namespace in (None, where):
                yield entry.document

    def create(self, kind: Kind, namespace: str | None, document: Document, write: Write | None = None) -> Document:
        write = write or Write()
        document = copied(document)
        metadata = document.setdefault("metadata", {})
        if prefix := metadata.get("generateName"):
            metadata.setdefault("name", f"{prefix}{next(self._uids):05d}")
        name = str(metadata.get("name") or "")
        if not name:
            raise Refused(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        if (kind, namespace, name) in self._entries:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        self._refuse_namespace(namespace)
        if kind.has_status:
            document.pop("status", None)
        metadata.update(
            uid=f"00000000-0000-4000-8000-{next(self._uids):012d}",
            creationTimestamp=f"{self._now():%Y-%m-%dT%H:%M:%SZ}",
        )
        if kind.has_generation:
            metadata["generation"] = 1
        if kind.namespaced:
            metadata["namespace"] = namespace
        entry = Entry({"apiVersion": kind.api_version, "kind": kind.name, **document})
        entry.owners[write.manager, self._operation(write), ""] = owned_fields(document)
        self._entries[kind, namespace, name] = entry
        self._publish("ADDED", kind, entry, None)
        return copied(entry.document)

    def replace(self, kind: Kind, namespace: str | None, name: str, document: Document, write: Write) -> Document:
        """Put an object; refuses one that was read before somebody else's change."""
        entry = self._entry(kind, namespace, name)
        metadata = document.get("metadata", {})
        seen = metadata.get("resourceVersion")
        if seen and seen != entry.document["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {kind.plural} "{name}": it was modified')
        fixed = ("uid", "creationTimestamp", "generation", "name", "namespace", "deletionTimestamp")
        old = entry.document["metadata"]
        kept = {name: old[name] for name in fixed if name in old}
        wanted = {**copied(document), "metadata": {**copied(metadata), **kept}}
        return self._store(kind, entry, wanted, write)

    def merge_patch(self, kind: Kind, namespace: str | None, name: str, patch: Document, write: Write) -> Document:
        """Apply a JSON merge patch, or a strategic one where the content type says so."""
        entry = self._entry(kind, namespace, name)
        seen = patch.get("metadata", {}).get("resourceVersion")
        if seen and seen != entry.document["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {kind.plural} "{name}": it was modified')
        if write.content_type.startswith("application/strategic"):
            return self._store(kind, entry, merged(entry.document, patch), write)
        return self._store(kind, entry, _merge_patched(entry.document, patch), write)

    def json_patch(self, kind: Kind, namespace: str | None, name: str, steps: list[Document], write: Write) -> Document:
        entry = self._entry(kind, namespace, name)
        document = copied(entry.document)
        for step in steps:
            _json_patch_step(document, step)
        return self._store(kind, entry, document, write)

    def apply(self, kind: Kind, namespace: str | None, name: str, applied: Document, write: Write) -> Document:
        """Server-side apply. An apply that says nothing new changes nothing, not even the version."""
        if not write.manager:
            raise Refused(400, "BadRequest", "fieldManager is required for apply patch")
        if applied.get("metadata", {}).get("name") != name:
            raise Refused(400, "BadRequest", "metadata.name of the applied object is not the name in the path")
        entry = self._entries.get((kind, namespace, name))
        if entry is None:
            if write.subresource:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            return self.create(kind, namespace, applied, write)
        applied = {key: value for key, value in applied.items() if key == "status" or not write.subresource}
        uid = applied.get("metadata", {}).get("uid")
        if uid and uid != entry.document["metadata"]["uid"]:
            raise Refused(
                409, "Conflict", f'Precondition failed: UID in precondition: {uid}, of {kind.plural} "{name}"'
            )
        owner = (write.manager, "Apply", write.subresource)
        wanted = owned_fields(applied)
        self._take_from_others(entry, owner, wanted, applied, write.force)
        others = frozenset().union(*(fields for who, fields in entry.owners.items() if who != owner))
        document = copied(entry.document)
        for gone in sorted(entry.owners.get(owner, frozenset()) - wanted - others, key=repr):
            document = without(document, gone)
        document = merged(document, applied)
        owners_before = entry.owners.get(owner)
        entry.owners[owner] = wanted
        return self._store(kind, entry, document, write, owners_changed=owners_before != wanted)

    def delete(self, kind: Kind, namespace: str | None, name: str, options: Document | None = None) -> Document:
        """Delete an object and what it owns; with finalizers it is only marked."""
        entry = self._entry(kind, namespace, name)
        metadata = entry.document["metadata"]
        required = (options or {}).get("preconditions") or {}
        for field_name in ("uid", "resourceVersion"):
            if required.get(field_name) not in (None, metadata[field_name]):
                raise Refused(409, "Conflict", f'Precondition failed: {field_name} of {kind.plural} "{name}"')
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                before = copied(entry.document)
                metadata["deletionTimestamp"] = f"{self._now():%Y-%m-%dT%H:%M:%SZ}"
                self._publish("MODIFIED", kind, entry, before)
            return copied(entry.document)
        self._remove((kind, namespace, name))
        return copied(entry.document)

    def compact(self) -> None:
        """Forget all changes so far: a watch that starts before them is told 410 Gone."""
        self.compacted = self.version
        self.changes.clear()

    def _store(
        self, kind: Kind, entry: Entry, document: Document, write: Write, owners_changed: bool = False
    ) -> Document:
        before = entry.document
        after = self._part(kind, before, document, write.subresource)
        if _unversioned(after) == _unversioned(before) and not owners_changed:
            return copied(before)
        if self._operation(write) == "Update":
            self._take_changed(entry, before, after, write)
        metadata = after["metadata"] = {**after.get("metadata", {}), "uid": before["metadata"]["uid"]}
        if kind.has_generation:
            metadata["generation"] = before["metadata"]["generation"] + (_spec(before) != _spec(after))
        entry.document = after
        self._publish("MODIFIED", kind, entry, before)
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._remove((kind, metadata.get("namespace"), metadata["name"]))
        return copied(entry.document)

    @staticmethod
    def _part(kind: Kind, before: Document, wanted: Document, subresource: str) -> Document:
        """Return what may be written: the status alone, or everything but the status."""
        if subresource:
            return {**before, "status": wanted.get("status", {})}
        if not kind.has_status:
            return wanted
        rest = {name: value for name, value in wanted.items() if name != "status"}
        return {**rest, "status": before["status"]} if "status" in before else rest

    @staticmethod
    def _take_from_others(
        entry: Entry, owner: tuple[str, str, str], wanted: Fields, applied: Document, force: bool
    ) -> None:
        for other, fields in list(entry.owners.items()):
            differing = {
                one
                for one in fields & wanted
                if other != owner and value_at(entry.document, one) != value_at(applied, one)
            }
            if differing and not force:
                names = ", ".join(".".join(map(str, one)) for one in sorted(differing, key=repr))
                raise Refused(409, "Conflict", f'Apply failed with conflicts with "{other[0]}": {names}')
            entry.owners[other] = fields - differing

    def _take_changed(self, entry: Entry, before: Document, after: Document, write: Write) -> None:
        old = dict(leaves(before))
        changed = owned_fields(after) & {path for path, value in leaves(after) if old.get(path, ...) != value}
        gone = set(old) - {path for path, _ in leaves(after)}
        entry.owners = {who: fields - changed - gone for who, fields in entry.owners.items()}
        mine = (write.manager, "Update", write.subresource)
        entry.owners[mine] = entry.owners.get(mine, frozenset()) | changed

    def _publish(self, type_: str, kind: Kind, entry: Entry, before: Document | None) -> None:
        self.version += 1
        metadata = entry.document["metadata"]
        metadata["resourceVersion"] = str(self.version)
        entry.owners = {who: fields for who, fields in entry.owners.items() if fields}
        metadata["managedFields"] = [
            {
                "manager": manager,
                "operation": operation,
                "apiVersion": kind.api_version,
                "time": metadata["creationTimestamp"],
                "fieldsType": "FieldsV1",
                "fieldsV1": fields_v1(fields),
                **({"subresource": subresource} if subresource else {}),
            }
            for (manager, operation, subresource), fields in entry.owners.items()
        ]
        change = Change(self.version, type_, kind, copied(entry.document), before)
        self.changes.append(change)
        if len(self.changes) > KEPT_CHANGES:
            self.compacted = self.changes.popleft().version
        for listener in tuple(self.listeners):
            listener(change)

    def _remove(self, key: ObjectKey) -> None:
        kind, _, name = key
        entry = self._entries.pop(key)
        self._publish("DELETED", kind, entry, entry.document)
        uid = entry.document["metadata"]["uid"]
        for (of, where, what), other in list(self._entries.items()):
            owners = other.document["metadata"].get("ownerReferences", [])
            inside = kind == NAMESPACE and where == name
            if (inside or any(owner["uid"] == uid for owner in owners)) and (of, where, what) in self._entries:
                self.delete(of, where, what)

    def _entry(self, kind: Kind, namespace: str | None, name: str) -> Entry:
        if entry := self._entries.get((kind, namespace, name)):
            return entry
        raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')

    def _refuse_namespace(self, namespace: str | None) -> None:
        if namespace is None:
            return
        found = self._entries.get((NAMESPACE, None, namespace))
        if found is None:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if found.document["metadata"].get("deletionTimestamp"):
            raise Refused(403, "Forbidden", f"namespace {namespace} is being terminated: nothing can be created in it")

    @staticmethod
    def _operation(write: Write) -> str:
        return "Apply" if write.content_type.startswith("application/apply-patch") else "Update"


def copied(value: T) -> T:
    """Return a copy of what came as JSON; many times quicker than deepcopy."""
    return cast(T, msgspec.json.decode(msgspec.json.encode(value)))


def _unversioned(document: Document) -> Document:
    hidden = ("resourceVersion", "managedFields", "generation")
    metadata = {name: value for name, value in document["metadata"].items() if name not in hidden}
    return {**document, "metadata": metadata}


def _spec(document: Document) -> Document:
    return {name: value for name, value in document.items() if name not in ("metadata", "status")}


def _merge_patched(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, Mapping):
        return copied(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merge_patched(result.get(name), value)
    return result


def _json_patch_step(document: Any, step: Document) -> None:
    """RFC 6902 without move and copy."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
    node = document
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    is_list = isinstance(node, list)
    place: Any = len(node) if last == "-" else int(last) if is_list else last
    match step["op"]:
        case "test":
            if (node[place] if is_list else node.get(place)) != step["value"]:
                raise Refused(422, "Invalid", f"the server rejected our request: test of {step['path']} failed")
        case "remove":
            del node[place]
        case "add" if is_list:
            node.insert(place, step["value"])
        case "add" | "replace":
            node[place] = step["value"]
