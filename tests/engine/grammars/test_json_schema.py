"""JSON schemas: whatever is let through is valid, each answer ends by itself, and what cannot be held is refused."""

import contextlib
import itertools
import json
import random
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.grammars.json_schema import check_form, lower
from pagefleet_engine.grammars.port import GrammarBackend
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.fakes.grammars import backend_of, byte_vocabulary, compiled, holds, random_answer

PIECES = (
    b'{"',
    b'":',
    b'",',
    b', "',
    b'"}',
    b"]}",
    b"true",
    b"false",
    b"null",
    b"  ",
    b"\n\n",
    b"\n  ",
    b"12",
    b"abc",
    b'"a"',
)
VOCABULARY = byte_vocabulary(PIECES)
BYTES = byte_vocabulary()

LEAVES: list[Any] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 17},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "email", "maxLength": 12},
    {"type": "string", "format": "uuid"},
    {"enum": ["x", 1, None, [1, {"a": 2}], 2.5]},
    {"const": {"k": ["v"]}},
    {"type": ["integer", "null", "boolean"], "maximum": 100, "minimum": 0},
    {"type": "string", "enum": ["a", "bb", 'c"c']},
]


def schemas(count: int, seed: int) -> list[Any]:
    """Make schemas of many kinds, all of which have answers of a bounded length."""
    maker = Maker(random.Random(seed))
    return [maker.one(3) for _ in range(count)]


class Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds = [self.some_object, self.some_array, self.some_choice, self.some_tuple, self.some_union, self.when]
        self._kinds += [self.some_set, self.some_containing]

    def one(self, depth: int) -> Any:
        if depth == 0 or self._rng.random() < 0.3:
            return self._rng.choice(LEAVES)
        return self._rng.choice(self._kinds)(depth - 1)

    def some_object(self, depth: int) -> Any:
        rng = self._rng
        names = rng.sample(["a", "b b", "c/d", 'q"', "é", "f"], rng.randint(1, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.one(depth) for name in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        if rng.random() < 0.2:
            schema |= {"dependentRequired": {names[0]: [names[-1]]}, "additionalProperties": False}
        return schema

    def some_array(self, depth: int) -> Any:
        least = self._rng.randint(0, 2)
        most = least + self._rng.randint(0, 2)
        return {"type": "array", "items": self.one(depth), "minItems": least, "maxItems": most}

    def some_tuple(self, depth: int) -> Any:
        return {"type": "array", "prefixItems": [self.one(depth) for _ in range(2)], "items": False, "minItems": 1}

    def some_set(self, depth: int) -> Any:
        values = self._rng.sample([1, 2, "x", None, [1], True], self._rng.randint(1, 4))
        return {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": self._rng.randint(0, 1)}

    def some_containing(self, depth: int) -> Any:
        rng, values = self._rng, [1, 2.5, "x", None]
        wanted: Any = rng.choice([{"type": "number"}, {"minimum": 2}, {"enum": rng.sample(values, 2)}, {"const": 1}])
        least = rng.randint(0, 2)
        schema = {"type": "array", "items": {"enum": values}, "contains": wanted, "minContains": least, "maxItems": 5}
        return schema | ({"maxContains": least + rng.randint(0, 2)} if rng.random() < 0.6 else {})

    def some_choice(self, depth: int) -> Any:
        return {"anyOf": [self.one(depth) for _ in range(self._rng.randint(1, 3))]}

    def some_union(self, depth: int) -> Any:
        kinds = [{"kind": {"const": kind}, "value": self.one(depth)} for kind in ("p", "q")]
        return {"oneOf": [{"type": "object", "properties": kind, "required": ["kind"]} for kind in kinds]}

    def when(self, depth: int) -> Any:
        return {
            "type": "object",
            "properties": {"kind": {"enum": ["r", "s", "t"]}, "r": self.one(depth), "s": self.one(depth)},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "r"}}, "required": ["kind"]},
            "then": {"required": ["r"]},
            "else": {"required": ["s"]},
            "additionalProperties": False,
        }


def formats() -> jsonschema.FormatChecker:
    """The formats that the library knows by itself, and RFC 3339's by Python's own."""
    checker = jsonschema.FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))

    def is_date_time(value: object) -> bool:
        return not isinstance(value, str) or ("T" in value and bool(datetime.fromisoformat(value)))

    def is_time(value: object) -> bool:
        return not isinstance(value, str) or (len(value) > 8 and is_date_time(f"2024-01-01T{value}"))

    checker.checks("date-time", ValueError)(is_date_time)
    checker.checks("time", ValueError)(is_time)
    return checker


@pytest.fixture(scope="module")
def guidance() -> GrammarBackend:
    return backend_of("guidance", VOCABULARY)


def compile_schema(backend: GrammarBackend, schema: Any, **options: Any) -> Any:
    return compiled(backend, StructuredOutputsParams(json=json.dumps(schema), **options))


@pytest.mark.parametrize("part", range(8))
def test_random_answers_are_valid_and_end_by_themselves(guidance: GrammarBackend, part: int) -> None:
    for number, schema in enumerate(schemas(50, part)):
        grammar = compile_schema(guidance, schema)
        checker = jsonschema.Draft202012Validator(schema, format_checker=formats())
        for seed in range(3):
            text = random_answer(grammar, VOCABULARY, 1000 * number + seed, most=3000)
            assert text is not None, schema
            value = json.loads(text)
            assert checker.is_valid(value), (schema, text)


def test_xgrammar_lets_through_nothing_else_of_what_it_takes() -> None:
    backend = backend_of("xgrammar", VOCABULARY)
    taken = 0
    for number, schema in enumerate([*LEAVES, *schemas(60, 99)]):
        try:
            grammar = compile_schema(backend, schema)
        except InvalidRequest:
            continue
        taken += 1
        for seed in range(3):
            text = random_answer(grammar, VOCABULARY, 1000 * number + seed, most=3000)
            assert text is not None, schema
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)
    assert taken >= 15


SAMPLES: list[Any] = [
    *(None, True, False, 0, 1, -1, 5, 7, 10, 17, 100, 0.5, 1.5, 2.25),
    *(
        "",
        "a",
        "ab",
        "abc",
        "é",
        'c"c',
        "2024-02-29",
        "2023-02-29",
        "2000-02-29",
        "1900-02-29",
        "2023-04-31",
        "0000-01-01",
        "1.2.3.4",
        "300.1.1.1",
    ),
    *([], [1], [1, 1], ["a"], [1, {"a": 2}], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"k": ["v"]}),
    *({"kind": "p"}, {"kind": "q", "value": 1}, {"kind": "z"}, {"a": 1, "c": 3}, {"aa": 1}),
]
WHOLE: list[Any] = [
    *LEAVES,
    {},
    {"type": "object"},
    {"not": {"type": ["string", "object"]}},
    {"not": {"type": "object", "required": ["a"]}},
    {"not": {"enum": [True, None]}, "type": ["boolean", "null", "string"]},
    {"enum": [1, "a", None], "not": {"const": "a"}},
    {"minimum": 5},
    {"not": {"minimum": 5}},
    {"not": {"maxLength": 1, "minItems": 1}},
    {"not": {"enum": [1, None, 0.5]}},
    {"if": {"exclusiveMaximum": 5}, "then": {"minimum": 0}, "else": {"multipleOf": 10}},
    {"contains": {"type": "integer"}},
    {"maxLength": 1},
    {"items": {"type": "integer"}},
    {"properties": {"a": {"type": "integer"}}},
    {"required": ["a"], "type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["a", "k"]}},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"type": "object", "minProperties": 1, "maxProperties": 1},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}], "type": "object"},
    {"allOf": [{"$ref": "#/$defs/x"}], "unevaluatedProperties": False, "$defs": {"x": {"properties": {"a": {}}}}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
    {"additionalItems": {"type": "integer"}, "unevaluatedItems": {"type": "string"}, "maxItems": 1},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "maximum": 5}]},
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "integer"}},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}}},
    {"minimum": 1, "exclusiveMinimum": True, "type": "integer", "$schema": "http://json-schema.org/draft-04/schema#"},
]


@pytest.mark.parametrize("schema", WHOLE, ids=lambda schema: json.dumps(schema)[:60])
def test_every_sample_that_is_let_through_is_valid_and_the_reverse_mostly(schema: Any) -> None:
    grammar = compile_schema(backend_of("guidance", BYTES), schema)
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
        schema, format_checker=formats()
    )
    if isinstance(schema.get("items"), list):
        checker = jsonschema.Draft7Validator(schema)
    passed = 0
    for value in SAMPLES:
        for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1, ensure_ascii=False)):
            is_let_through = holds(grammar, text.encode())
            passed += is_let_through
            assert checker.is_valid(value) or not is_let_through, text
    assert passed or not any(map(checker.is_valid, SAMPLES))


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
        {"type": "array", "items": {"$ref": "#/$defs/v"}, "uniqueItems": True, "$defs": {"v": {"enum": [1, 2, "a"]}}},
        {"prefixItems": [{"const": 1}, {"enum": [1, 2]}], "items": False, "uniqueItems": True, "minItems": 1},
        {"items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
        {"type": "array", "contains": {"const": 1}, "maxItems": 3},
        {"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxItems": 3},
        {"type": "array", "contains": {"const": 2}, "maxContains": 1, "maxItems": 3},
        {"type": "array", "contains": {"minimum": 2}, "minContains": 0, "maxContains": 1, "maxItems": 3},
        {"items": {"enum": [1, "a"]}, "contains": {"const": "a"}, "maxContains": 1, "maxItems": 3},
        {"contains": {"type": "null"}, "minContains": 4, "maxItems": 3},
        {"contains": {"type": "null"}, "minContains": 0},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_arrays_whose_items_are_counted_are_held_exactly_where_they_are_short(schema: Any) -> None:
    grammar = compile_schema(backend_of("guidance", BYTES), schema)
    checker = jsonschema.Draft202012Validator(schema)
    values = [1, 2, "a", True]
    arrays = [list(items) for size in range(4) for items in itertools.product(values, repeat=size)]
    for value in [*arrays, *([] if schema.get("type") else values)]:
        assert holds(grammar, json.dumps(value).encode()) == checker.is_valid(value), value


def test_what_a_long_array_contains_comes_first() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 9}, "minContains": 2}
    grammar = compile_schema(backend_of("guidance", BYTES), schema)
    assert holds(grammar, b"[9, 10, 3, 11]")
    assert not holds(grammar, b"[9]")
    assert not holds(grammar, b"[3, 9, 10]"), "which the schema allows, and the grammar does not"


def test_an_object_that_names_its_properties_takes_no_others_unless_it_says_so() -> None:
    backend = backend_of("guidance", BYTES)
    named = {"type": "object", "properties": {"a": {}}}
    two = b'{"a":1,"b":2}'
    assert not holds(compile_schema(backend, named), two)
    assert holds(compile_schema(backend, {**named, "additionalProperties": True}), two)
    assert holds(compile_schema(backend, {"allOf": [named, {"required": ["a"]}]}), two)
    assert not holds(compile_schema(backend, {"anyOf": [named, {"type": "null"}]}), two)
    assert not holds(compile_schema(backend, {"$ref": "#/$defs/x", "$defs": {"x": named}}), two)
    assert holds(compile_schema(backend, {"type": "object"}), two)
    assert not holds(compile_schema(backend, {"type": "object"}, disable_additional_properties=True), two)


def test_whitespace_is_capped_and_can_be_chosen() -> None:
    backend = backend_of("guidance", BYTES)
    schema = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}}
    value = [{"a": 1}, {}]
    texts = {indent: json.dumps(value, indent=indent).encode() for indent in (None, 2, 4)}
    compact = json.dumps(value, separators=(",", ":")).encode()
    usual = compile_schema(backend, schema)
    assert all(holds(usual, text) for text in [*texts.values(), compact])
    assert not holds(usual, b"[    ]")
    assert not holds(usual, b"[\n\n]")
    assert not holds(usual, b"[\n" + b" " * 33 + b"]")
    tight = compile_schema(backend, schema, disable_any_whitespace=True)
    assert holds(tight, compact)
    assert not holds(tight, texts[None])
    own = compile_schema(backend, schema, whitespace_pattern="_{0,2}")
    assert holds(own, b'[__{"a":1}]')
    assert not holds(own, texts[None])


TWO_ANCHORS: dict[str, Any] = {
    "$defs": {
        "a": {"$id": "one", "$dynamicAnchor": "x", "properties": {"x": {"$dynamicRef": "#x"}}},
        "b": {"$id": "two", "$dynamicAnchor": "x", "type": "null"},
    }
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (False, "#"),
        ({"type": "text"}, "#/type"),
        ({"properties": {"a": {"contains": {"pattern": "a"}, "maxContains": 1}}}, "#/properties/a/contains"),
        ({"contains": {}, "minContains": -1}, "#/minContains"),
        ({"items": {"contains": {"type": "null"}, "minContains": 0, "maxContains": 999}}, "#/items/contains"),
        ({"items": {"enum": list(range(9))}, "uniqueItems": True}, "#/uniqueItems"),
        ({"items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems"),
        # Few words that stand for much work, which is not begun.
        ({"contains": {"type": "null"}, "minContains": 10**12}, "#/contains"),
        ({"contains": {"type": "null"}, "minContains": 1e308}, "#/contains"),
        ({"contains": {}, "minContains": 0, "maxContains": 10**12, "maxItems": 10**12}, "#/contains"),
        ({"contains": {}, "minContains": 50, "maxContains": 10**7, "maxItems": 10**8}, "#/contains"),
        (
            {"prefixItems": [{"enum": list(range(12))}] * 13, "items": False, "minItems": 13, "uniqueItems": True},
            "#/uniqueItems",
        ),
        ({"items": {"enum": list(range(10**4))}, "minItems": 2, "uniqueItems": True}, "#/uniqueItems"),
        ({"prefixItems": [{"const": 1}] * 2000, "minItems": 2000, "uniqueItems": True}, "#/uniqueItems"),
        ({"$ref": "https://example.com/a.json"}, "#/$ref"),
        ({"$ref": "#/$defs/none"}, "#/$ref"),
        ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
        ({"items": {"$ref": "one"}, **TWO_ANCHORS}, "#/$defs/a/properties/x/$dynamicRef"),
        ({"$defs": {"a": {"$id": "b"}, "c": {"$id": "b"}}}, "#/$defs/c/$id"),
        ({"$id": "https://e.org/a", "$ref": "b#/c"}, "#/$ref"),
        ({"$defs": {"a": {"$id": "b"}}, "not": {"$ref": "b"}}, "#/not"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, "#/properties/a/not"),
        ({"properties": {"a": {"type": "string", "format": "iri"}}}, "#/properties/a/format"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "#/properties/a"),
        ({"$defs": {"x": {"pattern": "a(?!b)"}}, "items": {"$ref": "#/$defs/x"}}, "#/$defs/x"),
        ({"type": "object", "minProperties": 3}, "#/minProperties"),
        ({"properties": []}, "#/properties"),
        ({"required": "a"}, "#/required"),
        ({"properties": {"a": {"required": True}}}, "#/properties/a/required"),
        ({"items": {"divisibleBy": 2}}, "#/items/divisibleBy"),
        ({"minLength": -1}, "#/minLength"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"anyOf": []}, "#/anyOf"),
        ({"items": 3}, "#/items"),
        ({"enum": []}, "#/enum"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "#"),
        (
            {"anyOf": [{"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}]}]},
            "#/anyOf/0/unevaluatedProperties",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_path(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_schema(backend_of("guidance", BYTES), schema)
    assert f"'{place}'" in refused.value.message
    assert refused.value.param == "structured_outputs.json"


def test_schemas_of_one_of_must_be_apart() -> None:
    both = {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
    with pytest.raises(InvalidRequest, match=r"#/items.*use 'anyOf'"):
        compile_schema(backend_of("guidance", BYTES), {"type": "array", "items": both})


def test_no_malformed_schema_is_anything_but_refused() -> None:
    wrong: tuple[Any, ...] = (
        None,
        3,
        "a",
        [],
        [3],
        {"a": 3},
        [{}],
        True,
        {"$ref": 3},
        {"type": {}},
        -1,
        {"properties": {"a": 3}},
    )
    words = (
        *("type", "enum", "properties", "required", "items", "prefixItems", "anyOf", "not", "if", "$ref", "then"),
        *("minItems", "maximum", "pattern", "format", "additionalProperties", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "uniqueItems"),
        *("minProperties", "allOf", "oneOf", "contains", "minContains", "$defs", "$id", "$schema", "$anchor"),
    )
    for (one, other), (first, second) in itertools.product(
        itertools.permutations(words, 2), [(a, b) for a in wrong for b in wrong[:4]]
    ):
        try:
            lowered = lower({one: first, other: second})
        except InvalidRequest:
            continue
        assert isinstance(lowered.schema, dict)


def test_a_name_that_must_not_come_again_does_not() -> None:
    grammar = compile_schema(
        backend_of("guidance", BYTES),
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": True},
    )
    assert holds(grammar, b'{"a":1,"b":2}')
    assert not holds(grammar, b'{"a":1,"a":2}')
    assert not holds(grammar, b'{"b":1}')


def test_the_api_process_sees_most_faults_by_itself() -> None:
    check_form(StructuredOutputsParams(json={"type": "object"}))
    check_form(StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequest, match="#/items/uniqueItems"):
        check_form(StructuredOutputsParams(json={"items": {"uniqueItems": True}}))


def test_large_and_deep_schemas_are_lowered_or_refused() -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "integer", "title": "t" * 50} for n in range(4000)}}
    assert len(lower(wide).schema["properties"]) == 4000
    chain = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(5000)} | {"d5000": True}
    assert len(lower({"$ref": "#/$defs/d0", "$defs": chain}).schema["$defs"]) == 5001
    node = {"type": "object", "required": ["x"]}
    for forward in (True, False):  # each needs the next, in both orders
        needs = {f"d{n}": {**node, "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(2000)}
        names = list(needs) if forward else list(reversed(needs))
        all_of_them = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**needs, "d2000": {}}}
        with contextlib.suppress(InvalidRequest):
            assert False not in lower(all_of_them).schema["$defs"].values()
    many = {"anyOf": [{"const": n} for n in range(60_000)]}
    with pytest.raises(InvalidRequest, match="more than 50000 parts"):
        lower(many)
