"""Where references of a JSON schema lead: within the schema alone, by '$id', '$anchor' and JSON pointers.

A part with an '$id' of its own is a resource: references in it start from its URI. What a '$dynamicRef' means depends
on the way to it, unless it is the same on every way: all of them begin at the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from pagefleet_engine.grammars.json_keywords import escaped, refusal

_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)  # of schemas, by names
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_PARTS = frozenset(
    {"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_ELSEWHERE = "it refers to another document, and none is fetched: put what it means under '$defs'"
_NOTHING = "it refers to nothing in this schema"


class References:
    """Resolves the references of one schema. Places are JSON pointers that begin with '#'.

    Args:
        root: the whole schema.
        is_old: of a draft before 2019-09, where a '$ref' has no neighbours and '$id' may be an anchor.
    """

    def __init__(self, root: Any, is_old: bool) -> None:
        self._root = root
        self._is_old = is_old
        self._resources: dict[str, str] = {"#": ""}
        """Place -> URI, without a fragment."""
        self._by_uri: dict[str, str] = {}
        self._anchors: dict[tuple[str, str], str] = {}
        """(place of the resource, name) -> place; so are those that are dynamic."""
        self._dynamic: dict[tuple[str, str], str] = {}
        for part, at in _subschemas(root, "#"):
            self._note(part, at)
        self._by_uri.setdefault("", "#")

    @property
    def has_resources(self) -> bool:
        """Whether parts of the schema have URIs of their own."""
        return len(self._resources) > 1

    def place(self, word: str, value: Mapping[str, Any], at: str) -> str:
        """Return the place that a reference means.

        Args:
            word: `$ref`, `$dynamicRef` or `$recursiveRef`.
            value: the schema that has it.
            at: the schema's place.

        Raises:
            InvalidRequest: there is none in this schema, or which it is depends on the way.
        """
        ref, where = value[word], f"{at}/{word}"
        if not isinstance(ref, str):
            raise refusal(where, f"'{word}' takes a string")
        uri, _, fragment = ref.partition("#")
        home = self._resource_of(at)
        resource = self._by_uri.get(_join(self._resources[home], uri)) if uri else home
        if resource is None:
            raise refusal(where, _ELSEWHERE)
        fragment = unquote(fragment)
        if word == "$recursiveRef" or (word == "$dynamicRef" and (resource, fragment) in self._dynamic):
            return self._outermost(fragment, resource, where)
        if not fragment or fragment.startswith("/"):
            return resource + fragment.rstrip()
        if (found := self._anchors.get((resource, fragment))) is None:
            raise refusal(where, _NOTHING)
        return found

    def target(self, place: str, at: str) -> Any:
        """Return what stands at a place; `at` is to blame where nothing does.

        Raises:
            InvalidRequest: nothing does.
        """
        found = self._root
        for part in place.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise refusal(at, _NOTHING)
        return found

    def _outermost(self, name: str, resource: str, where: str) -> str:
        """Return the place of the outermost anchor of a name: on every way the root is the outermost resource."""
        if (resource, name) not in self._dynamic:
            return resource  # a '$recursiveRef' to what has no '$recursiveAnchor'
        named = {one: place for (one, other), place in self._dynamic.items() if other == name}
        if "#" in named:
            return named["#"]
        if len(named) > 1:
            raise refusal(where, "what it refers to depends on the way to it, which is not supported")
        return named[resource]

    def _resource_of(self, at: str) -> str:
        while at not in self._resources:
            at = at.rpartition("/")[0]
        return at

    def _note(self, part: Mapping[str, Any], at: str) -> None:
        """Take note of a subschema; those around it were noted before."""
        if self._is_old and "$ref" in part:
            return
        own = part.get("$id", part.get("id") if self._is_old else None)
        if isinstance(own, str):
            uri, _, fragment = own.partition("#")
            if uri:
                parent = self._resources[self._resource_of(at)]
                self._resources[at] = _join(parent, uri)
                if self._by_uri.setdefault(self._resources[at], at) != at:
                    raise refusal(f"{at}/$id", "another part of the schema has the same")
            if fragment:
                self._anchors[self._resource_of(at), unquote(fragment)] = at
        home = self._resource_of(at)
        for word in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(word), str):
                self._anchors[home, part[word]] = at
        if isinstance(part.get("$dynamicAnchor"), str):
            self._dynamic[home, part["$dynamicAnchor"]] = at
        if part.get("$recursiveAnchor") is True and at == home:
            self._dynamic[home, ""] = at


def _join(base: str, uri: str) -> str:
    return uri if urlsplit(uri).scheme else urljoin(base, uri)


def _subschemas(value: Any, at: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield a schema and all within it, with their places, the outer ones first; values and notes are no schemas."""
    if not isinstance(value, dict):
        return
    yield value, at
    for word, part in value.items():
        place = f"{at}/{escaped(word)}"
        if word in _NAMED and isinstance(part, dict):
            for name, inner in part.items():
                yield from _subschemas(inner, f"{place}/{escaped(name)}")
        elif word in _LISTS and isinstance(part, list):
            for i, inner in enumerate(part):
                yield from _subschemas(inner, f"{place}/{i}")
        elif word in _PARTS:
            yield from _subschemas(part, place)
