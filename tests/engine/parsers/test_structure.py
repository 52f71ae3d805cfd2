"""Forms of calls, compiled by xgrammar: what they let through is calls that are valid, and calls they let through."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.grammars.backends import make_backend
from pagefleet_engine.grammars.port import GrammarBackend, Matcher
from pagefleet_engine.grammars.vocabulary import Vocabulary
from pagefleet_engine.parsers.parts import CallArguments, CallBegins, Tool
from pagefleet_engine.parsers.structure import Choice, Format
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.engine.parsers.spoken import SPEECHES, TOOLS, Call, meaning_of, parse

FAMILIES = pytest.mark.parametrize("name", sorted(SPEECHES.keys() - {"mistral_ids"}))
BACKENDS = pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "</parameter>",
    "</arg_value>",
    "```",
    "</think>",
    "｜DSML｜",
    "</｜DSML｜parameter>",
)
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "<|python_start|>"),
    *("<|python_end|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<escape>"),
    *('<|"|>', "<|tool_call>", "<tool_call|>", "<start_function_call>", "<end_function_call>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|return|>", "<｜tool▁sep｜>"),
)
"""Special tokens; xgrammar knows none inside a form, so its vocabulary has them as others."""
TEXTS = [*map(chr, range(32, 127)), "\n", "é", *MARKERS, *SPECIAL, "</s>"]
STOP = len(TEXTS) - 1
CLOSERS = frozenset(TEXTS.index(text) for text in ('"', "}", "]", ")", ">", "/", "\n", *MARKERS, *SPECIAL)) | {STOP}


@lru_cache(maxsize=2)
def backend_of(name: str) -> GrammarBackend:
    special = [TEXTS.index(text) for text in SPECIAL] if name == "guidance" else []
    return make_backend(name, Vocabulary([text.encode() for text in TEXTS], [*special, STOP], [STOP]), 1)


def matcher_of(backend: str, form: Format) -> Matcher:
    library = backend_of(backend)
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    return library.load(library.compile(params)).matcher()


def tokens_of(text: str) -> list[int]:
    """Cut a text into the longest tokens."""
    found = []
    while text:
        token = max((text[:size] for size in range(1, 31) if text[:size] in TEXTS), key=len)
        found.append(TEXTS.index(token))
        text = text[len(token) :]
    return found


def accepts(matcher: Matcher, text: str) -> bool:
    return all(matcher.accept(token) for token in tokens_of(text)) and matcher.is_complete


STRICT = (
    Tool(
        "plan-trip",
        {
            "type": "object",
            "properties": {
                "from": {"type": "string", "minLength": 1, "maxLength": 6},
                "day": {"type": "string", "format": "date"},
                "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
                "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
                "first": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tier": {"enum": ["gold", "none", 3]},
            },
            "required": ["from", "seats"],
            "additionalProperties": False,
            "$defs": {
                "stop": {
                    "type": "object",
                    "properties": {"at": {"type": "string", "maxLength": 4}},
                    "required": ["at"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool("tag", {"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}}),
    Tool("end", {"type": "object", "properties": {}, "additionalProperties": False}),
    Tool(
        "maybe",
        {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"const": "x y"}},
            "additionalProperties": False,
        },
    ),
)


def as_json(calls: list[Call], name: str) -> str:
    """Return the calls as the family writes them, strings in double quotation marks."""
    text = SPEECHES[name].calls(calls).replace("'", '"')
    return text.removesuffix("<|call|>")


@FAMILIES
@pytest.mark.parametrize(("backend", "strict"), [("guidance", True), ("guidance", False), ("xgrammar", True)])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_form_is_the_family_s_own_syntax(name: str, backend: str, choice: Choice, strict: bool) -> None:
    one: list[Call] = [("get_weather", {"city": "a b", "days": 3, "unit": "C"})]
    two: list[Call] = [*one, ("now", {})]

    def matcher(parallel: bool) -> Matcher:
        return matcher_of(backend, SPEECHES[name].family.structure(TOOLS, choice, parallel, strict))

    one_text, two_text = as_json(one, name), as_json(two, name)
    if choice == "required" and name == "llama3":
        one_text, two_text = (text.removeprefix("<|python_tag|>") for text in (one_text, two_text))
    assert accepts(matcher(False), one_text)
    if name != "harmony":
        assert accepts(matcher(True), two_text)
        assert not accepts(matcher(False), two_text)
    assert accepts(matcher(True), "Hello") == (choice == "auto")
    wrong = as_json([("get_weather", {"city": "a", "days": 3})], name).replace("get_weather", "get_whether")
    assert not accepts(matcher(True), wrong) or (name == "llama3" and choice == "auto")


@FAMILIES
@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_form_lets_through_is_a_valid_call(name: str, seed: int) -> None:
    check_walk(name, seed)


@pytest.mark.nightly
@FAMILIES
def test_many_walks_through_forms(name: str) -> None:
    for seed in range(100, 150):
        check_walk(name, seed)


def check_walk(name: str, seed: int) -> None:
    """Follow a form through the backend that holds all of what the schemas say."""
    family = SPEECHES[name].family
    text = walk(matcher_of("guidance", family.structure(STRICT, "required", True, True)), random.Random(seed))
    parts = parse(family, text, False, tools=STRICT)
    assert all(isinstance(part, CallBegins | CallArguments) for part in parts), text
    calls = meaning_of(parts)
    assert calls
    schemas = {tool.name: tool.parameters for tool in STRICT}
    for _, (tool, arguments) in calls:
        jsonschema.validate(arguments, schemas[tool])
    assert parse(family, text, False, range(1, len(text)), STRICT) == parts


def walk(matcher: Matcher, chance: random.Random, limit: int = 4000) -> str:
    """Return a text that the matcher lets through, token by token; soon by tokens that end something."""
    row = np.zeros((len(TEXTS) + 31) // 32, np.int32)
    text = ""
    for step in range(limit):
        allowed = list(range(len(TEXTS)))
        if matcher.fill(row):
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TEXTS)]
            allowed = np.flatnonzero(bits).tolist()
        ending = [token for token in allowed if token in CLOSERS]
        token = chance.choice(ending if ending and chance.random() < (0.3 if step < 150 else 0.8) else allowed)
        assert matcher.accept(token)
        if token == STOP:
            return text
        text += TEXTS[token]
        if matcher.is_finished:
            return text
    raise AssertionError(f"no end: {text[-200:]}")


RAW = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "gemma4", "functiongemma")


@pytest.mark.parametrize("name", [*RAW, "llama4", "olmo3", "gemma3"])
@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (
            {"additionalProperties": False, "required": ["a"], "properties": {"a": False}},
            "no value is valid at '#/properties/a'",
        ),
        ({"type": "object", "minProperties": 1}, "'minProperties' cannot be held at '#/'"),
        ({"properties": {"a": {"$ref": "#/properties/b", "type": "object"}, "b": {"$ref": "#"}}}, "#/properties/"),
    ],
)
def test_a_schema_that_the_syntax_cannot_hold_is_refused_with_its_place(
    name: str, schema: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SPEECHES[name].family.structure([Tool("f", schema)], "required", False, True)
    assert where in refused.value.message
    assert refused.value.param == "tools"


@pytest.mark.parametrize("name", RAW)
def test_a_string_that_the_syntax_cannot_hold_is_refused_with_its_place(name: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "a", "minLength": 3}}}
    with pytest.raises(InvalidRequest, match="#/properties/a"):
        SPEECHES[name].family.structure([Tool("f", schema)], "required", False, True)
    schema = {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string", "not": {"const": "x"}}]}}}
    with pytest.raises(InvalidRequest, match="#/properties/a/anyOf/1"):
        SPEECHES[name].family.structure([Tool("f", schema)], "required", False, True)


@BACKENDS
def test_harmony_s_form_may_follow_a_thought_and_holds_the_final_channel(backend: str) -> None:
    form = SPEECHES["harmony"].family.content({"type": "json_schema", "json_schema": {"type": "object"}})
    for start in ("", "<|start|>assistant"):
        assert accepts(matcher_of(backend, form), f'{start}<|channel|>final<|message|>{{"a": 1}}')
    assert not accepts(matcher_of(backend, form), '{"a": 1}')
