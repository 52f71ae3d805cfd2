"""Strategic merge patches, as `kubectl patch` and kustomize have them, for pod templates.

Mappings are merged, null deletes, lists whose items have a key are merged by it, other lists are replaced.
`$patch: replace` and `$patch: delete` work on mappings and on items of keyed lists. Patches come from people; their
shape has been checked (`template_shape`). Source: Kubernetes, "Strategic Merge Patch" of community/contributors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

DIRECTIVE = "$patch"
LIST_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
"""Lists of a pod's spec that are merged, and the field that tells their items apart; `patchMergeKey` in its schema."""


def strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` merged in; neither is changed."""
    directive = patch.get(DIRECTIVE)
    if directive == "delete":
        return {}
    merged = {} if directive == "replace" else copy.deepcopy(dict(base))
    for name, value in patch.items():
        if name == DIRECTIVE:
            continue
        if _deletes(value):
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            below = merged.get(name)
            merged[name] = strategic_merge(below if isinstance(below, Mapping) else {}, value)
        elif isinstance(value, list) and name in LIST_KEYS:
            below = merged.get(name)
            merged[name] = _merge_list(name, below if isinstance(below, list) else [], value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _merge_list(name: str, base: Sequence[Any], patch: Sequence[Any]) -> list[Any]:
    """Merge items with the same key in place; new ones come last."""
    key = LIST_KEYS[name]
    replaced = any(set(item) == {DIRECTIVE} and item[DIRECTIVE] == "replace" for item in patch)
    merged = {} if replaced else {item[key]: item for item in base}
    for item in patch:
        if key not in item:
            continue
        if item.get(DIRECTIVE) == "delete":
            merged.pop(item[key], None)
            continue
        old = merged.get(item[key], {})
        if name == "volumes" and not _given(item) <= old.keys():
            # A volume has one source: another one takes the old one's place.
            old = {}
        merged[item[key]] = strategic_merge(old, item)
    return list(merged.values())


def _given(item: Mapping[str, Any]) -> set[str]:
    """Return the fields that an item sets."""
    return {name for name, value in item.items() if name != DIRECTIVE and not _deletes(value)}


def _deletes(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get(DIRECTIVE) == "delete")
