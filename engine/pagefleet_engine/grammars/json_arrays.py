"""Keywords of arrays. What counts over a whole array is written as the arrays that it allows, where they are few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pagefleet_engine.grammars.json_keywords import IN_PLACE, TYPES, Lowering, Schema, Step, refusal
from pagefleet_engine.grammars.json_negation import NOTES, same

_MOST_ARRAYS = 400
"""Kinds of arrays that one keyword may come to."""
_MOST_PARTS = 20_000
"""Items that these may have together."""
_MOST_LOOKED_AT = 5_000
"""Arrays and beginnings of arrays that are looked at to find these."""
_LONGEST = 100
"""Items that an array may be asked to have where each is written out."""


def _array_of(low: Lowering, parts: Any, at: str) -> list[Schema]:
    if not isinstance(parts, list):
        raise refusal(at, "it takes an array of schemas")
    return [low.node(part, f"{at}/{i}", True) for i, part in enumerate(parts)]


def _items(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    if isinstance(value["items"], list):  # as it was before 2020
        out["prefixItems"] = _array_of(low, value["items"], f"{at}/items")
        if "additionalItems" in value:
            out["items"] = low.node(value["additionalItems"], f"{at}/additionalItems", True)
    else:
        out["items"] = low.node(value["items"], f"{at}/items", True)


def _prefix_items(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    out["prefixItems"] = _array_of(low, value["prefixItems"], f"{at}/prefixItems")


def _unevaluated_items(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    rule, place = value["unevaluatedItems"], f"{at}/unevaluatedItems"
    if rule is True or rule == {} or ("items" in value and not isinstance(value["items"], list)):
        return
    if IN_PLACE & value.keys() or "contains" in value:
        raise refusal(place, "which items it is about depends on the answer")
    if "additionalItems" not in value or "items" not in value:
        out["items"] = low.node(rule, place, True)


# --- over a whole array ---


def _unique_items(
    low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
) -> None:
    """Every array of different values, one by one."""
    if value["uniqueItems"] is not True or "array" not in value.get("type", "array") or _length(value)[1] < 2:
        return
    message = f"it takes items of few values ('enum', 'const', 'boolean'), and at most {_MOST_ARRAYS} such arrays"
    found: list[Schema] = []
    for looked_at, values in enumerate(_different(low, value, at)):
        if len(found) >= _MOST_ARRAYS or looked_at >= _MOST_LOOKED_AT:
            raise refusal(f"{at}/uniqueItems", message)
        if len(values) >= _length(value)[0]:
            found.append(_tuple([{"const": one} for one in values], False))
    if not found:
        raise refusal(f"{at}/uniqueItems", message)
    also.append({"anyOf": [*_no_array(value), *found]})


def _different(low: Lowering, value: Mapping[str, Any], at: str) -> Iterator[list[Any]]:
    """Yield the arrays of different values that the items allow, and their beginnings; none where these are many."""
    least, most = _length(value)
    first, others = _parts(value)
    if max(least, len(first)) > _LONGEST:
        return
    domains = [_values(low, part, at) for part in (*first, others)]
    if None in domains or sum(len(domain or ()) for domain in domains) > _MOST_ARRAYS:
        return
    different: list[Any] = []
    numbered = [[_number(one, different) for one in domain or ()] for domain in domains]

    def grown(numbers: list[int]) -> Iterator[list[Any]]:
        yield [different[number] for number in numbers]
        if len(numbers) < most:
            for number in numbered[min(len(numbers), len(first))]:
                if number not in numbers:
                    yield from grown([*numbers, number])

    yield from grown([])


def _number(value: Any, different: list[Any]) -> int:
    """Return the place of a value among those that are not the same; a new one is added."""
    for number, other in enumerate(different):
        if same(value, other):
            return number
    different.append(value)
    return len(different) - 1


def _values(low: Lowering, part: Any, at: str) -> list[Any] | None:
    """Return the values that a subschema allows; None where they are not few."""
    for _ in range(8):
        if not isinstance(part, dict) or part.keys() - NOTES != {"$ref"}:
            break
        part, at = low.referred(part, at)
    if part is False:
        return []
    words = part.keys() - NOTES if isinstance(part, dict) else set()
    if words == {"type"} and part["type"] in ("boolean", "null"):
        return [True, False] if part["type"] == "boolean" else [None]
    if not words & {"enum", "const"} or words - {"enum", "const", "type"}:
        return None
    given = [part["const"]] if "const" in words else part["enum"]
    if len(given) > _MOST_ARRAYS:
        return None
    kept: list[Any] = []
    for one in given:  # those that the part's own type forbids are forbidden by 'items', too
        if not any(same(one, other) for other in kept):
            kept.append(one)
    return kept


def _contains(
    low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
) -> None:
    """Some items, as many as it takes, hold a schema: where arrays are short any of them, else the first ones.

    The others do not hold it, where there is a limit.
    """
    fewest, limit = value.get("minContains", 1), value.get("maxContains")
    if fewest == 0 and limit is None:
        return
    for word, number in (("minContains", fewest), ("maxContains", limit if limit is not None else 0)):
        if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number) or number < 0:
            raise refusal(f"{at}/{word}", f"'{word}' takes an integer of at least 0")
    _, most = _length(value)
    first, others = _parts(value)
    if max(fewest, len(first)) > _LONGEST:
        raise refusal(f"{at}/contains", f"it takes at most {_LONGEST} items that are written out")
    wanted = low.node(value["contains"], f"{at}/contains", False)
    other: Schema = True
    if limit is not None:
        beside = others if isinstance(others, dict) and not first else {}
        other = low.negated(beside, value["contains"], f"{at}/contains")
    found: list[Schema] = []
    num_parts = 0
    for number in range(int(fewest), int(min(fewest if limit is None else limit, most)) + 1):
        start = len(first) if len(first) + number <= most else 0
        for places in _places(number, start, most):
            length = places[-1] + 1 if places else 0
            num_parts += length
            if len(found) >= _MOST_ARRAYS or num_parts > _MOST_PARTS:
                raise refusal(f"{at}/contains", "there are too many ways to hold it: lower 'maxItems' or 'maxContains'")
            found.append(_tuple([wanted if place in places else other for place in range(length)], other))
    also.append({"anyOf": [*_no_array(value), *found]})


def _places(number: int, start: int, most: float) -> Iterable[Sequence[int]]:
    """Return where so many items may stand: anywhere, if there are few ways, else one after the other from `start`.

    In rising order.
    """
    if number == 0:
        return [()]
    if most <= _LONGEST and math.comb(int(most), number) <= _MOST_ARRAYS // 4:
        return combinations(range(int(most)), number)
    return [range(start, start + number)]


def _length(value: Mapping[str, Any]) -> tuple[int, float]:
    """Return the least and the most items of an array."""
    first, others = _parts(value)
    most = value.get("maxItems", math.inf)
    return int(value.get("minItems", 0)), min(most, len(first)) if others is False else most


def _parts(value: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and that of the others."""
    items = value.get("items", True)
    if isinstance(items, list):
        return items, value.get("additionalItems", True)
    return value.get("prefixItems", []), items


def _tuple(parts: list[Schema], rest: Schema) -> Schema:
    return {"type": "array", "prefixItems": parts, "items": rest, "minItems": len(parts)}


def _no_array(value: Mapping[str, Any]) -> list[Schema]:
    """Return what allows all but arrays; nothing where the type is said, and is no other."""
    kinds = value.get("type", [name for name in TYPES if name != "integer"])
    others = [name for name in ([kinds] if isinstance(kinds, str) else kinds) if name != "array"]
    return [{"type": others}] if others else []


ARRAY_STEPS: Mapping[str, Step] = {
    "items": _items,
    "prefixItems": _prefix_items,
    "contains": _contains,
    "uniqueItems": _unique_items,
    "unevaluatedItems": _unevaluated_items,
}
