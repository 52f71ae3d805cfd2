"""Arguments that a family does not write as JSON: which JSON its text is, by the tool's schema.

A text may be read in several ways ("5" for a string or an integer): it is what the schema allows and JSON says, and a
string where it is nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagefleet_engine.parsers.reading import Emit

Schema = Mapping[str, Any]

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
MAX_DEPTH = 16
"""Of references and unions that are followed for a type."""
_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    tuple: "array",
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def resolved(schema: Any, root: Schema) -> Schema:
    """Follow a schema's reference within its document; return {}, which allows all, where it leads nowhere."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def allowed_types(schema: Any, root: Schema, depth: int = 0) -> frozenset[str]:
    """Return which types of JSON a schema allows, as far as it says so."""
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return ALL_TYPES
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return frozenset(map(_type_of, values))
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = frozenset(name for name in names if name in ALL_TYPES) or ALL_TYPES
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            types &= frozenset().union(*(allowed_types(branch, root, depth + 1) for branch in branches))
    return types


def json_text(text: str, schema: Any, root: Schema) -> str:
    """Return the JSON of a value that was written without quotation marks around strings."""
    types = allowed_types(schema, root)
    listed = resolved(schema, root).get("enum")
    if isinstance(listed, list) and text in listed:
        return json.dumps(text, ensure_ascii=False)
    if (reading := _reading(text)) is not None:
        value, own = reading
        if _type_of(value) in types or (_type_of(value) == "integer" and "number" in types):
            return own
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _reading(text: str) -> tuple[Any, str] | None:
    """Return what a text is but a string, with its JSON: the text itself, as no float has all digits of a number."""
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        value = _WORDS[stripped.lower()]
        return value, json.dumps(value)
    try:
        return json.loads(stripped, parse_constant=no_number), stripped
    except (ValueError, RecursionError):
        return None


def no_number(name: str) -> None:
    """Refuse what Python's reader takes for numbers, and JSON does not."""
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> str:
    return "object" if isinstance(value, dict) else _NAMES[type(value)]


class ObjectWriter:
    """Writes a call's arguments as a JSON object while they are read.

    Args:
        schema: of the arguments.
        emit: where the JSON text goes.
    """

    def __init__(self, schema: Schema, emit: Emit) -> None:
        self._schema = schema
        self._emit = emit
        self._empty = True

    def begin(self) -> None:
        """Open the object."""
        self._emit("{")

    def key(self, key: str) -> Schema:
        """Begin a member; return the schema of its value."""
        self._emit(f"{'' if self._empty else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._empty = False
        whole = resolved(self._schema, self._schema)
        properties = whole.get("properties")
        found = (
            properties[key]
            if isinstance(properties, Mapping) and key in properties
            else whole.get("additionalProperties")
        )
        return found if isinstance(found, Mapping) else {}

    def is_text(self, schema: Schema) -> bool:
        """Return whether a value can only be a string, so that it can be written as it comes."""
        return allowed_types(schema, self._schema) == {"string"}

    def quote(self) -> None:
        """Open or close a string."""
        self._emit('"')

    def text(self, text: str) -> None:
        """Write a piece of a string."""
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def value(self, text: str, schema: Schema) -> None:
        """Write a whole value."""
        self._emit(json_text(text, schema, self._schema))

    def raw(self, text: str) -> None:
        """Write JSON, or what is left of a value that never ended."""
        self._emit(text)

    def end(self) -> None:
        """Close the object."""
        self._emit("}")
