"""Where an object is not as wanted. What the API server, or somebody else, added is no difference.

Only fields of the wanted object are looked at: what was wanted once and is no more shows in `pagefleet.dev/applied`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pagefleet_operator.render.strategic_merge import LIST_KEYS

_SERVER_KNOWS = frozenset({"apiVersion", "kind"})
"""An object's own address; items of lists come without."""
_POD_LISTS: dict[str, tuple[str, ...]] = {
    **{name: (key,) for name, key in LIST_KEYS.items()},
    # A patch goes by the first key alone.
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "protocol"),
}
_LIST_KEYS: Mapping[str, dict[str, tuple[str, ...]]] = {
    "": {"ownerReferences": ("uid",)},
    "Deployment": _POD_LISTS,
    "LeaderWorkerSet": _POD_LISTS,
    "Job": _POD_LISTS,
    "Service": {"ports": ("port", "protocol")},
}
"""Lists that others may add to, by kind, and what tells their items apart; all other lists are one value."""
_KEY_DEFAULTS = {"protocol": "TCP"}
_PRESENCE_MATTERS = frozenset(
    {
        # Absent, these are not false, zero or nothing, but something else.
        "allowPrivilegeEscalation",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "hostUsers",
        "replicas",
        "maxSurge",
        "maxUnavailable",
        "runAsGroup",
        "runAsUser",
        "fsGroup",
        "emptyDir",
        "podSelector",
        "namespaceSelector",
    }
)
_QUANTITIES = frozenset({"requests", "limits"})
"""Mappings whose values are quantities."""
_QUANTITY = frozenset({"sizeLimit"})
_WHOLE = frozenset({"selector", "podSelector", "namespaceSelector", "nodeSelector"})
"""Mappings that are one value: what somebody adds selects something else, and an apply takes it away again."""
_INT_OR_STRING = frozenset({"port", "targetPort", "maxSurge", "maxUnavailable"})
_NUMBER = re.compile(r"([+-]?[0-9]+\.?[0-9]*|[+-]?\.[0-9]+)(?:([eE][+-]?[0-9]{1,3})|(n|u|m|k|M|G|T|P|E|[KMGTPE]i))?\Z")
_SUFFIXES: Mapping[str | None, Decimal] = {
    None: Decimal(1),
    **{suffix: Decimal(10) ** (3 * power) for power, suffix in enumerate(("n", "u", "m"), start=-3)},
    **{suffix: Decimal(10) ** (3 * power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}


def differences(wanted: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of fields of `wanted` that `seen` has otherwise, or has not.

    Args:
        wanted: an object, or a part of one, as it would be applied.
        seen: as the API server has it.
    """
    keyed = _LIST_KEYS[""] | _LIST_KEYS.get(str(seen.get("kind") or wanted.get("kind")), {})
    named = {name: value for name, value in wanted.items() if name not in _SERVER_KNOWS}
    return tuple(_Comparison(keyed).mappings(named, seen, ""))


class _Comparison:
    """Walks two objects of one kind side by side."""

    def __init__(self, keyed: Mapping[str, tuple[str, ...]]) -> None:
        self._keyed = keyed

    def mappings(self, wanted: Mapping[str, Any], seen: Mapping[str, Any], path: str) -> Iterator[str]:
        for name, value in wanted.items():
            below = f"{path}.{name}" if path else name
            if name in seen and seen[name] is not None:
                yield from self.values(name, value, seen[name], below)
            elif value or (name in _PRESENCE_MATTERS and value is not None):
                # The API server leaves out what is empty, false or 0.
                yield below

    def values(self, name: str, wanted: Any, seen: Any, path: str) -> Iterator[str]:
        if wanted is None:
            return
        if isinstance(wanted, Mapping):
            if not isinstance(seen, Mapping):
                yield path
            elif name in _QUANTITIES:
                yield from _quantities(wanted, seen, path)
            elif name in _WHOLE and set(seen) - set(wanted):
                yield path
            else:
                yield from self.mappings(wanted, seen, path)
        elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
            yield from self.lists(name, wanted, seen, path)
        elif not _same_scalar(name, wanted, seen):
            yield path

    def lists(self, name: str, wanted: Sequence[Any], seen: Any, path: str) -> Iterator[str]:
        if not isinstance(seen, Sequence) or isinstance(seen, str):
            yield path
            return
        keys = self._keyed.get(name)
        if keys is None:
            if len(wanted) != len(seen):
                yield path
                return
            for number, (one, other) in enumerate(zip(wanted, seen, strict=True)):
                yield from self.values("", one, other, f"{path}[{number}]")
            return
        found = {_key(item, keys): item for item in seen}
        for item in wanted:
            key = _key(item, keys)
            below = f"{path}[{','.join(key)}]"
            if key not in found:
                yield below
            else:
                yield from self.values("", item, found[key], below)


def _key(item: Any, keys: Sequence[str]) -> tuple[str, ...]:
    values = item if isinstance(item, Mapping) else {}
    return tuple(str(values.get(key, _KEY_DEFAULTS.get(key, ""))) for key in keys)


def _quantities(wanted: Mapping[str, Any], seen: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in wanted.items():
        if name not in seen or not _same_quantity(value, seen[name]):
            yield f"{path}.{name}"


def _same_scalar(name: str, wanted: Any, seen: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(seen, bool):
        return wanted is seen
    if wanted == seen:
        return True
    if name in _INT_OR_STRING:
        return str(wanted) == str(seen)
    return name in _QUANTITY and _same_quantity(wanted, seen)


def _same_quantity(wanted: Any, seen: Any) -> bool:
    numbers = _number(str(wanted)), _number(str(seen))
    return str(wanted) == str(seen) or (None not in numbers and numbers[0] == numbers[1])


def _number(quantity: str) -> Decimal | None:
    """Return what a Kubernetes quantity stands for; None for what is none."""
    found = _NUMBER.match(quantity)
    if found is None:
        return None
    digits, exponent, suffix = found.groups()
    return Decimal(digits + (exponent or "")) * _SUFFIXES[suffix]
