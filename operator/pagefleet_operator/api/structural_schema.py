"""Pydantic's JSON schema in the structural form that the API server takes.

References inlined, `null` alternatives dropped, `const` as `enum`, no titles, no `additionalProperties: false` (the API
server prunes by itself), rules attached to their places.
Source: Kubernetes documentation, "Specifying a structural schema" of CustomResourceDefinitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.resource_rules import ITEMS, Rule

Schema = dict[str, Any]


def resource_schema(resource: type[InferenceService | InferenceProfile], rules: Sequence[Rule]) -> Schema:
    """Return the schema of a whole resource, with its rules."""
    schema = resource.model_json_schema(by_alias=True)
    root = _structural(schema, schema.get("$defs", {}))
    # The API server has its own schema for these three.
    for name in ("apiVersion", "kind"):
        root["properties"][name] = {"type": "string"}
    # Its own names may be longer than ours; rules look at this one, and their cost depends on the length. Without
    # generateName beside it, the API server puts its own unlimited name in this one's place.
    root["properties"]["metadata"] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 253}, "generateName": {"type": "string"}},
    }
    root["required"] = [name for name in root["required"] if name == "spec"]
    if not root["required"]:
        del root["required"]
    for rule in rules:
        _place(root, rule.at).setdefault("x-kubernetes-validations", []).append(_validation(rule))
    return root


def _place(schema: Schema, at: Sequence[str]) -> Schema:
    for part in at:
        schema = schema["items"] if part == ITEMS else schema["properties"][part]
    return schema


def _validation(rule: Rule) -> Schema:
    validation = {"rule": rule.cel, "message": rule.message}
    return {**validation, "fieldPath": f".{rule.field}"} if rule.field else validation


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return one node of the schema, and all below it."""
    node = _plain_node(schema, definitions)
    values = node.pop("additionalProperties", False)
    if isinstance(values, dict):
        node["additionalProperties"] = _structural(values, definitions)
    if "items" in node:
        node["items"] = _structural(node["items"], definitions)
    if "properties" in node:
        node["properties"] = {name: _structural(value, definitions) for name, value in node["properties"].items()}
    return node


def _plain_node(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return a node without what the API server does not take; what is below it is left as it is."""
    node = dict(schema)
    if "$ref" in node:
        node = {**definitions[node.pop("$ref").rpartition("/")[2]], **node}
    if node.get("x-kubernetes-int-or-string"):
        node.pop("type", None)
    else:
        alternatives = [option for option in node.pop("anyOf", []) if option != {"type": "null"}]
        if len(alternatives) == 1:
            node = {**_plain_node(alternatives[0], definitions), **node}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    for unwanted in ("title", "$defs"):
        node.pop(unwanted, None)
    return _with_default(node) if "default" in node else node


def _with_default(node: Schema) -> Schema:
    """Drop defaults that say nothing; an object's default is `{}`, so that its fields' own defaults apply."""
    default = node.pop("default")
    if default is None or default == "":
        return node
    return {**node, "default": {} if isinstance(default, dict) else default}
