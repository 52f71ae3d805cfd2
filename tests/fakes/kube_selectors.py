"""Label and field selectors, as lists and watches take them. No test in here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Matches = Callable[[Mapping[str, Any]], bool]
_IN_SET = re.compile(r"(\S+)\s+(in|notin)\s+\((.*)\)")
_OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")


def selector(labels: str, fields: str) -> Matches:
    """Return what tells whether an object matches both selectors; an empty one matches all."""
    by_label = [_label_rule(term.strip()) for term in _OUTSIDE_BRACKETS.split(labels) if term.strip()]
    by_field = [term.replace("==", "=").partition("=")[::2] for term in fields.split(",") if term]

    def matches(document: Mapping[str, Any]) -> bool:
        found = document.get("metadata", {}).get("labels") or {}
        return all(rule(found) for rule in by_label) and all(_field_is(document, *rule) for rule in by_field)

    return matches


def _label_rule(term: str) -> Matches:
    if in_set := _IN_SET.fullmatch(term):
        name, operator, values = in_set[1], in_set[2], {value.strip() for value in in_set[3].split(",")}
        return lambda labels: (labels.get(name) in values) == (operator == "in")
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    name, operator, value = re.fullmatch(r"([^=!]+)(!=|==|=|)(.*)", term).groups()  # type: ignore[union-attr]
    if not operator:
        return lambda labels: name in labels
    return lambda labels: (labels.get(name) == value) == (operator != "!=")


def _field_is(document: Mapping[str, Any], path: str, value: str) -> bool:
    wanted_equal = not path.endswith("!")
    node: Any = document
    for part in path.rstrip("!").split("."):
        node = (node or {}).get(part)
    return (str(node) == value) == wanted_equal
