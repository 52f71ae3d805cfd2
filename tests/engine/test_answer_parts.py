"""What a request asks of a family's answer, and its parts as chats write them: streamed, whole and continued."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.answer_parts import AnswerPlan, plan_answer
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.engine_core.output_text import Chunk, OutputSoFar
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.parsers.families import THINK
from pagefleet_engine.parsers.family import AnswerFamily, MarkedFamily
from pagefleet_engine.parsers.formats.harmony import Harmony
from pagefleet_engine.parsers.formats.json_objects import HERMES
from pagefleet_engine.server.answers import AnswerHead, Collected, EventWriter, TokenCounts
from pagefleet_engine.server.chat import PartsFormat, Shown
from pagefleet_engine.server.continuation import NotedEvents, NotedStream, ShownChoice
from pagefleet_protocol.handoff import MARKS, StreamState, unpack_tokens
from pagefleet_protocol.openai_chat import ChatRequest, read_chat_request
from pagefleet_protocol.openai_common import StreamOptions
from pagefleet_protocol.openai_forms import FORM, at_path
from pagefleet_protocol.sampling_params import SamplingParams

from tests.engine.server.test_continuation import CASES, check_every_cut
from tests.fakes.inline_engine import script_core
from tests.fakes.scripted_engine import ByteTokenizer
from tests.fakes.stream_site import TOKENIZER, blocks_of, gathered, open_site, script_of

FAMILY = MarkedFamily("both", HERMES, THINK)
SILENT = MarkedFamily("plain")
NAMES = frozenset({"messages", "tools"})
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "get_time", "parameters": {"type": "object"}}
ANSWER = (
    "<think>\nWhich tool? <tool_call> is for calls.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo \\"é\\" 你好"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def chat(*functions: dict[str, Any], **fields: Any) -> ChatRequest:
    tools = {"tools": [{"type": "function", "function": function} for function in functions]} if functions else {}
    return read_chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **tools, **fields})


def plan(asked: ChatRequest, tail: str = "", family: AnswerFamily = FAMILY) -> AnswerPlan:
    return plan_answer(asked, family, tail, NAMES)


def tag_of(sampling: SamplingParams) -> Any:
    assert sampling.structured_outputs is not None
    return json.loads(sampling.structured_outputs.json_text)["format"]


def test_a_plain_chat_asks_for_nothing() -> None:
    asked = chat()
    made = plan(asked, family=SILENT)
    assert made.is_plain
    assert made.sampling == asked.sampling
    assert not plan(asked).is_plain, "it may think"
    assert plan(asked).sampling.thinking is None, "nobody needs to know when it ends"


def test_calls_that_are_required_are_the_form() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    tools = plan(chat(WEATHER, CLOCK, tool_choice=named)).tools
    assert [tool.name for tool in tools] == ["get_time"]
    form = tag_of(plan(chat(WEATHER, CLOCK, tool_choice=named)).sampling)
    assert form == FAMILY.structure(tools, "required", False, True)
    every = plan(chat(WEATHER, CLOCK, tool_choice="required"))
    assert tag_of(every.sampling) == FAMILY.structure(every.tools, "required", True, True)
    free = plan(chat(WEATHER, CLOCK))
    assert tag_of(free.sampling) == FAMILY.structure(free.tools, "auto", True, True)
    assert plan(chat(WEATHER, tool_choice="none")).sampling.structured_outputs is None


def test_some_of_the_tools_may_be_allowed() -> None:
    one = {"type": "function", "function": {"name": "get_time"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
    asked = chat(WEATHER, CLOCK, tool_choice=allowed)
    assert [tool.name for tool in plan(asked).tools] == ["get_time"]
    assert [tool.name for tool in asked.conversation.tools] == ["get_weather", "get_time"], "the prompt stays the same"


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"guided_json": {"type": "null"}}, {"type": "json_schema", "json_schema": {"type": "null"}}),
        ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        (
            {"guided_choice": ["a", "b"]},
            {"type": "or", "elements": [{"type": "const_string", "value": text} for text in "ab"]},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"type": "any_text"},
        ),
    ],
)
def test_an_answer_has_its_form_or_calls(fields: dict[str, Any], own: dict[str, Any]) -> None:
    made = plan(chat(WEATHER, **fields))
    assert tag_of(made.sampling) == {
        "type": "or",
        "elements": [FAMILY.structure(made.tools, "required", True, True), own],
    }


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}}
BESIDE_OTHERS = pytest.mark.parametrize(("functions", "family"), [((WEATHER,), FAMILY), ((), Harmony())])


@BESIDE_OTHERS
def test_a_form_beside_calls_or_channels_has_no_whitespace_where_none_is_asked_for(
    functions: tuple[dict[str, Any], ...], family: AnswerFamily
) -> None:
    for form in ({"json": SCHEMA}, {"json_object": True}):
        for has_none in (False, True):
            asked = chat(*functions, structured_outputs=form | {"disable_any_whitespace": has_none})
            text = json.dumps(tag_of(plan(asked, family=family).sampling))
            assert ('"max_whitespace_cnt": 0' in text) is has_none


@BESIDE_OTHERS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_what_cannot_be_said_of_a_form_beside_calls_or_channels_is_refused(
    functions: tuple[dict[str, Any], ...], family: AnswerFamily, fields: dict[str, Any], param: str
) -> None:
    asked = chat(*functions, **fields)
    with pytest.raises(InvalidRequest) as caught:
        plan(asked, family=family)
    error = at_path(caught.value, FORM, asked.form_path)
    assert error.param == param
    assert f"'{param}'" in error.message
    assert plan(chat(**fields)).sampling.structured_outputs == asked.sampling.structured_outputs, "alone it holds"


def test_a_form_stands_where_the_family_writes_content() -> None:
    form = {"type": "json_schema", "json_schema": {"type": "object"}}
    placed = Harmony().content(form)
    asked = chat(response_format={"type": "json_object"})
    assert tag_of(plan(asked, family=Harmony()).sampling) == placed
    assert plan(asked).sampling.structured_outputs == asked.sampling.structured_outputs
    with_tools = chat(CLOCK, response_format={"type": "json_object"})
    assert tag_of(plan(with_tools, family=Harmony()).sampling)["elements"][1] == placed


def test_a_thought_that_the_prompt_opens_or_closes() -> None:
    form = {"response_format": {"type": "json_object"}}
    opened = plan(chat(**form), "assistant\n<think>\n")
    assert opened.opened_thought
    assert opened.sampling.thinking is not None
    assert opened.sampling.thinking.opened
    closed = plan(chat(**form), "<think>\n\n</think>\n\n")
    assert (closed.opened_thought, closed.sampling.thinking) == (False, None)
    may = plan(chat(**form), "what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert may.sampling.thinking is not None
    assert not may.sampling.thinking.opened
    assert may.sampling.thinking.start == "<think>"


def test_a_thought_that_the_last_message_leaves_open_goes_on() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so"}]
    asked = chat(messages=messages, continue_final_message=True)
    assert plan(asked, "<think>so").opened_thought
    messages[1]["content"] += "</think>y"
    assert not plan(chat(messages=messages, continue_final_message=True), "y").opened_thought


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "low"}, 2048),
        ({"reasoning_effort": "low", "thinking_token_budget": 9}, 9),
    ],
)
def test_an_effort_that_no_template_knows_is_a_budget(fields: dict[str, Any], budget: int) -> None:
    thinking = plan(chat(**fields)).sampling.thinking
    assert thinking is not None
    assert thinking.budget == budget
    assert plan(chat(reasoning_effort="high")).sampling.thinking is None
    knows = plan_answer(chat(reasoning_effort="low"), FAMILY, "", NAMES | {"reasoning_effort"})
    assert knows.sampling.thinking is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (chat(WEATHER), "tools"),
        (chat(thinking_token_budget=5), "thinking_token_budget"),
        (chat(reasoning_effort="high"), "reasoning_effort"),
    ],
    ids=["tools", "budget", "effort"],
)
def test_a_family_is_not_asked_for_what_it_cannot_do(asked: ChatRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(asked, family=SILENT)
    assert caught.value.param == param
    plan(chat(thinking_token_budget=0, reasoning_effort="none"), family=SILENT)


class Client:
    """Puts the deltas of one choice together, as SDKs do."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.calls: dict[int, dict[str, str]] = {}
        self.reason: str | None = None

    def take(self, event: bytes) -> None:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            assert self.reason is None, "an event after the end"
            self.reason = choice["finish_reason"]
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name):
                    self.text[name] = self.text.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                known = self.calls.setdefault(call["index"], {"arguments": ""})
                if "id" in call:
                    assert set(known) == {"arguments"}, "a call begins once"
                    known |= {"id": call["id"], "name": call["function"]["name"]}
                known["arguments"] += call["function"]["arguments"]


STATE = StreamState("0123456789abcdef" * 2, 1_700_000_001)


def stream(choice: ShownChoice, chunks: Sequence[Chunk]) -> bytes:
    """Return the noted events of one choice."""
    made = plan(chat(WEATHER, CLOCK))
    form = PartsFormat(Shown(SamplingParams(), ByteTokenizer()), made.parts("chatcmpl-7"), include_reasoning=True)
    counts = TokenCounts(Generation("id", [[1]], SamplingParams()), form)
    writer = EventWriter("chat.completion.chunk", AnswerHead("chatcmpl-7", 1, "m"), form, counts, StreamOptions())
    noted = NotedEvents(writer, NotedStream(STATE, (choice,)))
    return b"".join(noted.events(0, chunk) for chunk in chunks)


def chunks_of(text: str, cuts: Sequence[int], start: int = 0) -> list[Chunk]:
    """Cut a text; token i is its character i."""
    edges = sorted({start, *(cut for cut in cuts if start < cut < len(text)), len(text)})
    ends = list(itertools.pairwise(edges))
    reasons = ["stop" if b == len(text) else None for _, b in ends]
    return [
        Chunk(text[a:b], list(range(a, b)), finish_reason=reason, lengths=[1] * (b - a))
        for (a, b), reason in zip(ends, reasons, strict=True)
    ]


WHOLE = {
    "content": "Let me look.",
    "reasoning_content": "Which tool? <tool_call> is for calls.",
    "reasoning": "Which tool? <tool_call> is for calls.",
}


@given(st.sets(st.integers(1, len(ANSWER) - 1), max_size=40), st.data())
def test_a_client_gets_the_same_message_however_the_stream_is_cut(cuts: set[int], data: st.DataObject) -> None:
    blocks = blocks_of(stream(ShownChoice(), chunks_of(ANSWER, sorted(cuts))))
    num_seen = data.draw(st.integers(0, len(blocks)))
    seen = gathered(b"".join(blocks[:num_seen]))
    if num_seen == len(blocks):
        client = client_of(seen.events)
    else:
        ids = unpack_tokens(seen.tokens.get(0, b""))
        tokens = [token for token in ids if token not in MARKS]
        num_chars = seen.num_chars.get(0, 0)
        so_far = OutputSoFar(tokens, num_chars) if tokens else None
        known = ShownChoice(num_chars, bool(ids), MARKS.intersection(ids), so_far)
        rest = chunks_of(ANSWER, sorted(cuts), len(tokens))
        if num_chars:
            ended = len(tokens) == len(ANSWER)
            lengths = [1] * len(tokens)
            resumed = Chunk(ANSWER[num_chars : len(tokens)], (), shown=ANSWER[:num_chars], lengths=lengths)
            rest = [replace(resumed, finish_reason="stop")] if ended else [resumed, *rest]
        client = client_of(seen.events + gathered(stream(known, rest)).events)
    assert client.text == WHOLE
    assert client.reason == "tool_calls"
    assert [call["name"] for call in client.calls.values()] == ["get_weather", "get_time"]
    assert json.loads(client.calls[0]["arguments"]) == {"city": 'Oslo "é" 你好'}
    assert client.calls[1]["arguments"] == "{}"
    assert len({call["id"] for call in client.calls.values()}) == 2


def client_of(events: bytes) -> Client:
    client = Client()
    for event in blocks_of(events):
        client.take(event)
    return client


def test_a_whole_message_is_what_the_stream_comes_to() -> None:
    made = plan(chat(WEATHER, CLOCK))
    form = PartsFormat(Shown(SamplingParams(), ByteTokenizer()), made.parts("chatcmpl-7"), include_reasoning=True)
    collected = Collected(finish_reason="stop")
    for chunk in chunks_of(ANSWER, [70]):
        form.read(0, chunk)
    assert form.num_thought_tokens == len("Which tool? <tool_call> is for calls.\n</think>\n\n")
    head = {"id": "chatcmpl-7", "created": 1, "model": "m", "usage": None}
    (choice,) = form.whole([collected], head).choices
    client = client_of(gathered(stream(ShownChoice(), chunks_of(ANSWER, [70]))).events)
    message = choice.message
    assert (message.content, message.reasoning, message.reasoning_content) == (
        WHOLE["content"], WHOLE["reasoning"], WHOLE["reasoning"],
    )  # fmt: skip
    assert isinstance(message.tool_calls, list)
    calls = {i: (c.id, c.function.name, c.function.arguments) for i, c in enumerate(message.tool_calls)}
    assert calls == {i: (c["id"], c["name"], c["arguments"]) for i, c in client.calls.items()}
    assert choice.finish_reason == "tool_calls"


def test_a_call_that_was_cut_off_ends_by_length() -> None:
    parts = plan(chat(WEATHER, CLOCK)).parts("chatcmpl-7")
    parts.take(0, Chunk(ANSWER[:-30], ()))
    assert parts.finish(0, Chunk("", (), finish_reason="length"))[1] == "length"


def test_a_client_may_not_want_to_see_the_thought() -> None:
    made = plan(chat(include_reasoning=False))
    form = PartsFormat(Shown(SamplingParams(), ByteTokenizer()), made.parts("chatcmpl-7"), include_reasoning=False)
    assert form.content(0, Chunk("<think>hidden", ())) is None
    shown = form.content(0, Chunk("</think>yes", ()))
    assert shown is not None
    assert json.loads(shown)["delta"] == {"content": "yes"}


@pytest.mark.parametrize("case", ["plain", "usage", "usage in each event", "stop string", "one token"])
def test_a_thought_goes_on_at_another_engine(case: str) -> None:
    async def run() -> None:
        script = script_of("<think>Why the 你好?\n</think>\n\nThe héllo 😀 and the end. Thé")
        family = MarkedFamily("thinks", None, THINK)
        async with open_site(script_core(script, 400), TOKENIZER, family=family) as site:
            await check_every_cut(site, "/v1/chat/completions", **CASES[case])

    asyncio.run(run())
