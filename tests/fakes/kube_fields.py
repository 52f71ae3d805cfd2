"""Who owns which field: server-side apply on plain objects, as the API server does it, simplified.

A field is a path: names of mappings, and ("name", "engine")-like keys for items of lists that are maps in Kubernetes'
schemas. Other lists are one value. Without the schemas, a list is known as a map by the name of its field. No test in
here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Key = tuple[tuple[str, Any], ...]
Path = tuple[str | Key, ...]
Fields = frozenset[Path]

_LIST_KEYS: Mapping[str, Sequence[str]] = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_NOT_OWNED = frozenset(
    {("apiVersion",), ("kind",)}
    | {
        ("metadata", name)
        for name in (
            "name",
            "namespace",
            "uid",
            "resourceVersion",
            "generation",
            "creationTimestamp",
            "deletionTimestamp",
            "managedFields",
        )
    }
)


def owned_fields(document: Mapping[str, Any]) -> Fields:
    """Return the fields that a manager who applies `document` owns."""
    return frozenset(path for path, _ in leaves(document) if path[:2] not in _NOT_OWNED and path[:1] not in _NOT_OWNED)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every field that has no fields below it, with its value."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, (*path, name))
    elif (keyed := _keyed(value, path)) is not None:
        for key, item in keyed.items():
            yield from leaves(item, (*path, key))
    elif path:
        yield path, value


def merged(live: Any, applied: Any, path: Path = ()) -> Any:
    """Return `live` with all that `applied` says."""
    if isinstance(live, Mapping) and isinstance(applied, Mapping):
        below = {name: merged(live.get(name), value, (*path, name)) for name, value in applied.items()}
        return {**live, **below}
    old, new = _keyed(live, path), _keyed(applied, path)
    if old is not None and new is not None:
        return [merged(old.get(key), new[key], (*path, key)) if key in new else old[key] for key in {**old, **new}]
    return copy.deepcopy(applied)


def without(document: Any, field: Path) -> Any:
    """Return `document` without one field, nor the mappings and items that only led to it."""
    part, rest = field[0], field[1:]
    if isinstance(document, Mapping) and part in document:
        assert isinstance(part, str)
        below = without(document[part], rest) if rest else None
        return {name: below if name == part else value for name, value in document.items() if name != part or below}
    if isinstance(document, list) and isinstance(part, tuple):
        key = {name for name, _ in part}  # stays as long as anything else of the item does
        drops = bool(rest) and rest[0] not in key
        items = [without(item, rest) if drops and _has_key(item, part) else item for item in document]
        return [item for item in items if not _has_key(item, part) or (rest and set(item) - key)]
    return document


def value_at(document: Any, field: Path) -> Any:
    """Return the value of a field; None where there is none."""
    found = _below(document, field[:1])
    if found is None:
        return None
    return value_at(found[0], field[1:]) if len(field) > 1 else found[0]


def fields_v1(fields: Fields) -> dict[str, Any]:
    """Return fields in the form of metadata.managedFields[].fieldsV1."""
    tree: dict[str, Any] = {}
    for path in sorted(fields, key=repr):
        node = tree
        for part in path:
            name = f"f:{part}" if isinstance(part, str) else f"k:{json.dumps(dict(part), separators=(',', ':'))}"
            node = node.setdefault(name, {})
    return tree


def _below(document: Any, step: Path) -> tuple[Any] | None:
    """Return what lies one step down, in a tuple, since it may be None itself."""
    part = step[0]
    if isinstance(part, str):
        return (document[part],) if isinstance(document, Mapping) and part in document else None
    items = document if isinstance(document, list) else []
    return next(((item,) for item in items if _has_key(item, part)), None)


def _has_key(item: Any, key: Key) -> bool:
    return isinstance(item, Mapping) and all(item.get(name, _DEFAULTS.get(name)) == value for name, value in key)


_DEFAULTS = {"protocol": "TCP"}


def _keyed(value: Any, path: Path) -> dict[Key, Any] | None:
    """Return the items of a list that is a map, by key; None for everything else."""
    if not isinstance(value, list) or not value or not path or not all(isinstance(item, Mapping) for item in value):
        return None
    names = _LIST_KEYS.get(str(path[-1]))
    if path[-1] == "ports":
        names = ("containerPort" if "containerPort" in value[0] else "port", "protocol")
    if names is None or path[:1] == ("ports",):  # the ports of an EndpointSlice are one value
        return None
    keys = [tuple((name, item.get(name, _DEFAULTS.get(name))) for name in names) for item in value]
    return dict(zip(keys, value, strict=True)) if len(set(keys)) == len(keys) else None
