"""References of JSON schemas lead where their URIs do, within the schema alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pagefleet_engine.grammars.port import Grammar
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.fakes.grammars import backend_of, byte_vocabulary, compiled, holds

BYTES = byte_vocabulary()
NODE = {"$id": "https://e.org/tree", "$dynamicAnchor": "node", "properties": {"next": {"$dynamicRef": "#node"}}}


NULL = {"type": "null"}
DYNAMIC = {
    "$id": "https://e.org/texts",
    "$ref": "list",
    "$defs": {
        "text": {"$dynamicAnchor": "item", "type": "string"},
        "list": {
            "$id": "list",
            "type": "array",
            "items": {"$dynamicRef": "#item"},
            "$defs": {"any": {"$dynamicAnchor": "item"}},
        },
    },
}
"""The root's own anchor is the outermost, and counts."""
REFERENCES: list[tuple[Any, Any, Any]] = [
    (
        {"$id": "https://e.org/a/b", "$ref": "c#/$defs/n", "$defs": {"x": {"$id": "c", "$defs": {"n": NULL}}}},
        None,
        1,
    ),
    ({"$ref": "urn:x:1#n", "$defs": {"x": {"$id": "urn:x:1", "$defs": {"y": {"$anchor": "n", **NULL}}}}}, None, 1),
    (
        {
            "$id": "https://e.org/",
            "$ref": "d/",
            "$defs": {
                "n": {"$id": "d/", "items": {"$ref": "n"}},
                "m": {"$id": "d/n", **NULL},
                "k": {"$id": "n", "type": "integer"},
            },
        },
        [None],
        [1],
    ),
    ({"properties": {"a": {"$ref": "#x"}}, "$defs": {"y": {"$anchor": "x", **NULL}}}, {"a": None}, {"a": 1}),
    (
        {"properties": {"a": {"$dynamicRef": "#x"}}, "$defs": {"y": {"$dynamicAnchor": "x", **NULL}}},
        {"a": None},
        {"a": 1},
    ),
    ({**NODE, "additionalProperties": False}, {"next": {"next": {}}}, {"next": {"nxt": {}}}),
    (
        {"$recursiveAnchor": True, "properties": {"a": {"$recursiveRef": "#"}}, "additionalProperties": False},
        {"a": {}},
        {"a": {"b": 1}},
    ),
    (
        {"const": {"$id": "https://e.org/a"}, "$defs": {"a": {"enum": [{"$id": "x"}, {"$id": "x"}]}}},
        {"$id": "https://e.org/a"},
        {"$id": "x"},
    ),
    (DYNAMIC, ["a"], [1]),
]


def compile_schema(schema: Any) -> Grammar:
    return compiled(backend_of("guidance", BYTES), StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize(("schema", "good", "bad"), REFERENCES, ids=lambda part: json.dumps(part)[:60])
def test_references_lead_where_their_uris_do(schema: Any, good: Any, bad: Any) -> None:
    grammar = compile_schema(schema)
    assert holds(grammar, json.dumps(good).encode())
    assert not holds(grammar, json.dumps(bad).encode())
