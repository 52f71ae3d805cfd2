"""What does not hold a JSON schema, as a schema again, where that can be said without 'not'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

_SCALARS = ("null", "boolean", "number", "string", "array", "object")
NOTES = frozenset({"title", "description", "$comment", "examples", "default", "deprecated"})
_MOST_PARTS = 64
_BEYOND = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""Bound -> the type that it is of, and the bound that holds where it does not: so much further."""


class Negation:
    """Negates subschemas of one place. What holds the result does not hold the original; the reverse need not be so.

    Args:
        beside: the schema around it: what it allows a property tells which values are left of it.
        resolve: follows a reference, where a subschema is nothing else.
    """

    def __init__(self, beside: Mapping[str, Any], resolve: Callable[[Any], Any]) -> None:
        self._beside = beside
        self._resolve = resolve

    def of(self, value: Any) -> Any:
        """Return what is not `value`; None where it cannot be said."""
        return self._of(value, self._beside, 0)

    def _of(self, value: Any, beside: Any, depth: int) -> Any:
        value = self._resolve(value)
        if isinstance(value, bool):
            return not value
        if not isinstance(value, dict) or depth > 16:
            return None
        parts: list[Any] = []
        words = {word: value[word] for word in value if word not in NOTES}
        if {"properties", "required"} & words.keys() and words.keys() <= {"type", "properties", "required"}:
            parts = self._of_object(words, beside, depth)
            words = {word: words[word] for word in ("type",) if word in words}
        for word, argument in words.items():
            parts.append(self._of_word(word, argument, value, beside, depth))
        if any(part is None for part in parts) or len(parts) > _MOST_PARTS:
            return None
        if True in parts:
            return True
        parts = [part for part in parts if part is not False]
        return {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else False

    def _of_word(self, word: str, argument: Any, value: Mapping[str, Any], beside: Any, depth: int) -> Any:
        if word == "type":
            named = {argument} if isinstance(argument, str) else set(argument)
            gone = named | ({"number"} if "integer" in named else set())
            others = [kind for kind in _SCALARS if kind not in gone]
            return {"type": others} if others else False
        if word in ("enum", "const"):
            return _other_values(argument if word == "enum" else [argument], beside)
        if word == "not":
            return argument
        if word in _BEYOND and not isinstance(argument, bool):
            kind, bound, further = _BEYOND[word]
            return {"type": kind, bound: argument + further} if argument + further >= 0 or kind == "number" else False
        if word in ("anyOf", "allOf"):
            parts = [self._of(part, beside, depth + 1) for part in argument]
            return None if None in parts else {"allOf" if word == "anyOf" else "anyOf": parts}
        return None

    def _of_object(self, words: Mapping[str, Any], beside: Any, depth: int) -> list[Any]:
        """An object that lacks a name that it needs, or has one with another value."""
        named, needed = words.get("properties", {}), words.get("required", [])
        allowed = beside.get("properties", {}) if isinstance(beside, dict) else {}
        parts: list[Any] = [{"type": "object", "properties": {name: False}} for name in needed]
        for name, part in named.items():
            other = self._of(part, self._resolve(allowed.get(name, {})), depth + 1)
            if other is None:
                return [None]
            if other is not False:
                parts.append({"type": "object", "properties": {name: other}, "required": [name]})
        return parts


def _other_values(values: list[Any], beside: Any) -> Any:
    """What is none of some values: of what is allowed beside it, the rest; no text, array or object is told apart."""
    if isinstance(beside, dict):
        allowed = beside.get("enum", [beside["const"]] if "const" in beside else None)
        if isinstance(allowed, list):
            rest = [value for value in allowed if not any(same(value, other) for other in values)]
            return {"enum": rest} if rest else False
    numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    if not all(value is None or isinstance(value, bool | int | float) for value in values):
        return None
    kept = [value for value in (None, True, False) if not any(value is other for other in values)]
    between = [
        {"type": "number"}
        | ({} if low is None else {"exclusiveMinimum": low})
        | ({} if high is None else {"exclusiveMaximum": high})
        for low, high in pairwise([None, *numbers, None])
    ]
    return {"anyOf": [{"type": ["string", "array", "object"]}, *between, *([{"enum": kept}] if kept else [])]}


def same(one: Any, other: Any) -> bool:
    """Whether JSON takes two values for equal: 1 and 1.0 are, 1 and true are not."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
