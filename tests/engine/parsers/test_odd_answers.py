"""Answers that are not as their format says, or hide one format in another."""

from __future__ import annotations

import pytest
from pagefleet_engine.parsers.families import answer_family
from pagefleet_engine.parsers.parts import CallArguments, CallBegins, Content, Part, Reasoning, Tool

from tests.engine.parsers.spoken import parse

TOOLS = (
    Tool(
        "f", {"properties": {"s": {"type": "string"}, "n": {"type": ["integer", "null"]}, "u": {"$ref": "#/$defs/u"}}}
    ),
    Tool("g", {}),
)
SAID = '{"s": "a\\n\\"b\\\\", "n": '
TAGGED = '<tool_call>\n<function=f>\n<parameter=s>\na\n"b\\\n</parameter>\n<parameter=n>\n{}\n</parameter>\n'
NUMBER = "<tool_call>\n<function=f>\n<parameter=u>\n{}\n</parameter>\n</function>\n</tool_call>"
CALL = [CallBegins(0, "f")]


def both(name: str, text: str, thoughts: str | None = "qwen3", opened: bool = False) -> list[Part]:
    """Return the parts, which are the same whether the text comes at once or by characters."""
    family = answer_family("", name, None if name == "harmony" else thoughts)
    parts = parse(family, text, opened, tools=TOOLS)
    assert parse(family, text, opened, range(1, len(text)), TOOLS) == parts
    return parts


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        # Names
        (
            "hermes",
            '<tool_call>{"name": "no_tool", "arguments": {}}',
            [CallBegins(0, "no_tool"), CallArguments(0, "{}")],
        ),
        ("hermes", r'<tool_call>{"name": "\ud800"}', [Content(r'<tool_call>{"name": "\ud800"}')]),
        ("hermes", r'<tool_call>{"name": "</tool_call>"}', [CallBegins(0, "</tool_call>"), CallArguments(0, "{}")]),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', [Content('<tool_call>{"name": ""}</tool_call>')]),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', [Content('{"name": "Bob", "parameters": {}}')]),
        (
            "llama3_json",
            '{"name": "g"}; {"name": "g"}',
            [
                CallBegins(0, "g"),
                CallArguments(0, "{}"),
                CallBegins(1, "g"),
                CallArguments(1, "{}"),
            ],
        ),
        ("llama4_pythonic", "[link](there) and g()", [Content("[link](there) and g()")]),
        ("llama4_pythonic", "[f(1)]", [Content("[f(1)]")]),
        # Arguments
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [*CALL, CallArguments(0, "{}")]),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": "{\"s\": \"é\"}"}</tool_call>',
            [
                *CALL,
                CallArguments(0, '{"s": "é"}'),
            ],
        ),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": {"s": "\ud800 \\"}}</tool_call>',
            [
                *CALL,
                CallArguments(0, r'{"s": "\ud800 \\"}'),
            ],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a', [*CALL, CallArguments(0, '{"s": "a')]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}} } </tool_call>',
            [
                *CALL,
                CallArguments(0, "{}"),
                Content("} </tool_call>"),
            ],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]"}[TOOL_CALLS]g{}',
            [
                *CALL,
                CallArguments(0, '{"s": "[TOOL_CALLS]"}'),
                CallBegins(1, "g"),
                CallArguments(1, "{}"),
            ],
        ),
        ("granite", "<|tool_call|>[]", [Content("<|tool_call|>[]")]),
        # Values by the schema
        ("qwen3_coder", TAGGED.format("7"), [*CALL, CallArguments(0, f"{SAID}7")]),
        ("qwen3_coder", TAGGED.format("None") + "</function>", [*CALL, CallArguments(0, f"{SAID}null}}")]),
        ("qwen3_coder", TAGGED.format("7.0") + "</tool_call>", [*CALL, CallArguments(0, f"{SAID}7}}")]),
        ("qwen3_coder", NUMBER.format("6e3081"), [*CALL, CallArguments(0, '{"u": 6e3081}')]),
        (
            "qwen3_coder",
            NUMBER.format("0.1000000000000000055"),
            [*CALL, CallArguments(0, '{"u": 0.1000000000000000055}')],
        ),
        ("qwen3_coder", NUMBER.format('{"a": 6e3081}'), [*CALL, CallArguments(0, '{"u": {"a": 6e3081}}')]),
        ("qwen3_coder", TAGGED.format("NaN") + "</tool_call>", [*CALL, CallArguments(0, f'{SAID}"NaN"}}')]),
        ("llama4_pythonic", "[f(n=6e3081, u=NaN)]", [*CALL, CallArguments(0, '{"n": 6e3081, "u": "NaN"}')]),
        ("qwen3_coder", TAGGED.format("x") + "oh", [*CALL, CallArguments(0, f'{SAID}"x"}}'), Content("oh")]),
        ("glm45", "<tool_call>g</tool_call>", [CallBegins(0, "g"), CallArguments(0, "{}")]),
        ("glm45", "<tool_call>two words</tool_call>", [Content("<tool_call>two words</tool_call>")]),
        (
            "llama4_pythonic",
            r"[f(s='\x41\u00e9\d\'', n=[1, (2,), {'a': None}], u=word)]",
            [
                *CALL,
                CallArguments(0, r"""{"s": "\u0041\u00e9\\d'", "n": [1, [2], {"a": null}], "u": "word"}"""),
            ],
        ),
        (
            "gemma4",
            '<|tool_call>call:f{s:<|"|>a"}<|"|>,n:-1.5,u:{k:[true]}}<tool_call|>',
            [
                *CALL,
                CallArguments(0, '{"s": "a\\"}", "n": -1.5, "u": {"k": [true]}}'),
            ],
        ),
        # Thoughts
        ("hermes", "<think>a <think> b</think> <think>c", [Reasoning("a <think> b"), Content("<think>c")]),
        (
            "hermes",
            '<think>a<tool_call>{"name": "f"}</tool_call>b</think>c',
            [
                Reasoning("a"),
                *CALL,
                CallArguments(0, "{}"),
                Reasoning("b"),
                Content("c"),
            ],
        ),
        (
            "hermes",
            '<think>as <tool_call>{"name": "x"}</think>c',
            [Reasoning('as <tool_call>{"name": "x"}'), Content("c")],
        ),
        ("hermes", "a <think>b</think>", [Content("a <think>b</think>")]),
        ("hermes", "<think></think>\n\n  ", []),
    ],
)
def test_what_an_answer_means(name: str, text: str, wanted: list[Part]) -> None:
    assert both(name, text) == wanted


def test_a_model_may_open_its_thought_once_more() -> None:
    assert both("hermes", "\n<think>\na</think>b", opened=True) == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize("end", ["", "</response>", "</response>\n"])
def test_an_answer_may_have_tags_of_its_own_after_the_thought(end: str) -> None:
    text = f"<think>a</think>\n<response>b <i></i>{end}"
    assert both("hermes", text, "granite33") == [Reasoning("a"), Content("b <i></i>")]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", [Content("plain")]),
        (
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.f"
            '<|channel|>commentary json<|message|>{"s": "<|end|>"}<|call|>',
            [Content("I will look."), *CALL, CallArguments(0, '{"s": "<|end|>"}')],
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis to=python code"
            "<|message|>1+1<|call|><|start|>assistant<|channel|>final<|message|>2<|return|>",
            [Reasoning("a1+1"), Content("2")],
        ),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [Reasoning("a"), Content("b")]),
        ("<|channel|>commentary to=functions.f<|message|>not JSON", [*CALL, CallArguments(0, "not JSON")]),
        ("<|channel|>what <b> is this", [Content("<|channel|>what <b> is this")]),
        ("<|channel|>ana", [Content("<|channel|>ana")]),
    ],
)
def test_harmony_s_messages(text: str, wanted: list[Part]) -> None:
    assert both("harmony", text) == wanted


def test_a_harmony_prompt_may_open_the_thought() -> None:
    text = "a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert both("harmony", text, opened=True) == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama4_pythonic", "gemma4", "harmony"])
def test_what_is_nested_without_end_ends(name: str) -> None:
    begins = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"s": ',
        "qwen3_coder": "<tool_call><function=f><parameter=u>",
        "llama4_pythonic": "[f(s=",
        "gemma4": "<|tool_call>call:f{s:",
        "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    }
    family = answer_family("", name)
    parts = parse(family, begins[name] + "[" * 100_000, False, tools=TOOLS)
    assert parts[0] == CallBegins(0, "f")
    written = sum(part.text.count("[") for part in parts if isinstance(part, CallArguments | Content))
    assert written == 100_000
