"""From a client's JSON schema to the part of JSON Schema that a backend holds exactly, or to a refusal with the path.

What comes out has no reference but to its own `$defs` and only keywords that llguidance implements. Each keyword is
kept, written with others that mean the same or less, or refused; what JSON Schema itself says nothing by (annotations,
unknown keywords and formats) is left out. So whatever holds the lowered schema holds the client's.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Container, Mapping
from typing import Any

from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from pagefleet_engine.grammars.json_arrays import ARRAY_STEPS
from pagefleet_engine.grammars.json_keywords import IN_PLACE, OBJECT_WORDS, REFERENCES, STEPS, Schema, refusal
from pagefleet_engine.grammars.json_negation import Negation
from pagefleet_engine.grammars.json_references import References

_STEPS = {**STEPS, **ARRAY_STEPS}
MAX_NODES = 50_000
"""Of subschemas, those that are referred to once."""
_MOST_ROUNDS = 32
_OLD_DRAFT = re.compile(r"draft-0?[34567]\b")


class LoweredSchema:
    """What `lower` returns.

    Attributes:
        schema: an object; its references are `#/$defs/...`.
        places: of each subschema in it, by `id`, the path in the client's schema.
    """

    def __init__(self, schema: dict[str, Any], places: Mapping[int, str]) -> None:
        self.schema = schema
        self.places = places


def lower(schema: Any, close_objects: bool = False) -> LoweredSchema:
    """Lower a schema that was decoded from JSON of a bounded depth.

    Objects that name their properties take no others unless the schema says so.

    Args:
        schema: an object or a boolean.
        close_objects: let objects that name none have none, either.

    Raises:
        InvalidRequest: it is no schema, or cannot be held; the message names the JSON path.
    """
    try:
        return _Lowering(schema, close_objects).run()
    except (TypeError, AttributeError, ValueError, KeyError, RecursionError) as error:
        # Some steps look at neighbours before these were looked at themselves.
        raise refusal("#", "it is no valid JSON schema") from error


def check_form(params: StructuredOutputsParams) -> None:
    """Refuse a form of whose schema alone can be seen that it cannot be held; some 10 ms for 100 kB.

    Raises:
        InvalidRequest: as `lower` does.
    """
    if params.json is not None:
        lower(json.loads(params.json_text), params.disable_additional_properties)


class _Lowering:
    def __init__(self, root: Any, close_objects: bool) -> None:
        self._root = root
        self._close_objects = close_objects
        self._old = isinstance(root, dict) and bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
        self._names: dict[tuple[str, bool], str] = {}
        self._todo: deque[tuple[str, str, bool]] = deque()
        self._places: dict[int, str] = {}
        self._num_nodes = 0
        self._references = References(root, self._old)

    def run(self) -> LoweredSchema:
        top = self.node(self._root, "#", True)
        defs: dict[str, Any] = {}
        while self._todo:
            name, pointer, closed = self._todo.popleft()
            defs[name] = self.node(self._references.target(pointer, pointer), pointer, closed)
        endless = _endless(defs)
        if top is False or not _ends(top, defs, endless):
            raise refusal("#", "no answer of a finite length has this form")
        for name in endless:
            defs[name] = False
        schema = dict(top) if isinstance(top, dict) else {}
        self._places[id(schema)] = "#"
        if defs:
            schema["$defs"] = defs
        return LoweredSchema(schema, self._places)

    def node(self, value: Any, at: str, closed: bool) -> Schema:
        """Lower one subschema. `closed`: no other subschema speaks of the same object."""
        if isinstance(value, bool):
            return {} if value else False
        if not isinstance(value, dict):
            raise refusal(at, "a schema is an object, true or false")
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise refusal(at, f"the schema has more than {MAX_NODES} parts")
        if self._old and "$ref" in value:
            value = {"$ref": value["$ref"]}  # its neighbours meant nothing before 2019
        out: dict[str, Any] = {}
        also: list[Schema] = []
        shared = _is_shared(value)
        for word in value:
            if (step := _STEPS.get(word)) is not None:
                step(self, value, at, out, also, closed and not shared)
        if closed and self._closes(value, shared):
            out["additionalProperties"] = False
        if also:
            out["allOf"] = [*out.get("allOf", ()), *also]
        self._places[id(out)] = at
        return out

    def _closes(self, value: Mapping[str, Any], shared: bool) -> bool:
        if _says_of_others(value):
            return False
        if self._close_objects:
            return "properties" in value or value.get("type") == "object"
        named = value.get("properties")
        return (
            isinstance(named, dict)
            and not shared
            and not IN_PLACE & value.keys()
            and set(names if isinstance(names := value.get("required"), list) else ()) <= named.keys()
            and value.get("minProperties", 0) <= len(named)
        )

    # --- references ---

    def refer(self, word: str, value: Mapping[str, Any], at: str, closed: bool) -> str:
        """Return the reference to the lowered definition that a reference in `value` means."""
        pointer = self._references.place(word, value, at)
        self._references.target(pointer, f"{at}/{word}")
        key = (pointer, closed)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._todo.append((self._names[key], pointer, closed))
        return f"#/$defs/{self._names[key]}"

    def referred(self, value: Mapping[str, Any], at: str) -> tuple[Any, str]:
        """Return the client's schema that `$ref` of `value` means, and its place."""
        pointer = self._references.place("$ref", value, at)
        return self._references.target(pointer, f"{at}/$ref"), pointer

    def negated(self, beside: Mapping[str, Any], value: Any, at: str) -> Schema:
        """Return what is not `value`, lowered, within what `beside` says of the same thing."""
        self.node(value, at, False)  # which refuses what is no schema
        negation = Negation(beside, lambda part: self._followed(part, at)).of(value)
        if negation is None:
            raise refusal(
                at, "'not' (and 'if', whose 'else' is one) is supported of types, values, bounds and properties alone"
            )
        return self.node(negation, at, False)

    def _followed(self, part: Any, at: str) -> Any:
        if not isinstance(part, dict) or set(part) != {"$ref"}:
            return part
        if self._references.has_resources:  # what the result refers to would start from another URI
            raise refusal(at, "'not' and 'if' of references are not supported beside an '$id' within the schema")
        found, place = self.referred(part, at)
        self.node(found, place, False)
        return found


def _is_shared(value: Mapping[str, Any]) -> bool:
    """Whether several subschemas speak of the same object, so that none of them may close it."""
    in_place = IN_PLACE & value.keys()
    parts = value.get("allOf")
    both = isinstance(parts, list) and len(parts) > 1
    mixed = bool(in_place and OBJECT_WORDS & value.keys())
    return both or mixed or len(in_place) > 1 or bool(in_place - REFERENCES - {"allOf", "anyOf", "oneOf"})


def _says_of_others(value: Mapping[str, Any]) -> bool:
    return bool({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"} & value.keys())


def _endless(defs: Mapping[str, Schema]) -> set[str]:
    """Return the definitions that nothing of a finite length holds, such as a node that needs a node.

    Those found last are mostly what the others need, so they come first.
    """
    endless: dict[str, None] = dict.fromkeys(reversed(list(defs)))
    for _ in range(_MOST_ROUNDS):
        before = len(endless)
        for name in list(endless):
            if _ends(defs[name], defs, endless):
                del endless[name]
        if len(endless) == before:
            return set(endless)
    raise refusal("#", "its definitions need each other in chains that are too long")


def _ends(value: Schema, defs: Mapping[str, Schema], endless: Container[str]) -> bool:
    """Whether some value of a finite length may hold `value`, if nothing holds what is in `endless`."""
    if isinstance(value, bool):
        return value
    needed = list(value.get("allOf", ()))
    if value.get("type") in ("object", ["object"]):
        named, others = value.get("properties", {}), value.get("additionalProperties", {})
        needed += [named.get(name, others) for name in value.get("required", ())]
    elif value.get("type") in ("array", ["array"]):
        least, first = value.get("minItems", 0), value.get("prefixItems", [])
        needed += [*first[:least], *([value.get("items", {})] if least > len(first) else [])]
    choices = [value[word] for word in ("anyOf", "oneOf") if word in value]
    return (
        ("$ref" not in value or value["$ref"].rsplit("/", 1)[1] not in endless)
        and all(_ends(part, defs, endless) for part in needed)
        and all(any(_ends(part, defs, endless) for part in parts) for parts in choices)
    )
