"""Answers told as items and as blocks: their events, and how another engine goes on with them."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.answer_parts import AnswerParts
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.families import answer_family
from pagefleet_engine.parsers.parts import Tool
from pagefleet_engine.server.answer_script import AnswerScript, NotedTelling, Telling
from pagefleet_engine.server.answers import TokenCounts
from pagefleet_engine.server.continuation import NotedStream, ShownChoice
from pagefleet_engine.server.messages_api.message import MessageScript
from pagefleet_engine.server.responses_api.response import ResponseHead, ResponseScript
from pagefleet_protocol.handoff import StreamState, take_note
from pagefleet_protocol.openai_responses import chat_request, read_responses_request
from pagefleet_protocol.sampling_params import SamplingParams

NUMBER = "0123456789abcdef" * 2
FAMILY = answer_family("<think></think><tool_call>", "hermes", "qwen3")
TOOLS = [Tool("get_weather", {"type": "object"})]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
TEXT = f"<think>\nHm, 你好.\n</think>\n\nI look.\n{CALL}\n{CALL}"


def response_script() -> AnswerScript:
    asked = read_responses_request({"model": "m", "input": "Hi", "include": ["reasoning.encrypted_content"]})
    return ResponseScript(ResponseHead(NUMBER, 5, asked, chat_request(asked), True), lambda chunk: [])


def message_script() -> AnswerScript:
    return MessageScript(NUMBER, "m", ["zz"], True)


SCRIPTS = {"responses": response_script, "messages": message_script}


def telling(kind: str, num_events: int = 0) -> Telling:
    parts = AnswerParts([FAMILY.parser(TOOLS, False)], "answer")
    counts = TokenCounts(Generation("r", [[1, 2, 3]], SamplingParams(max_tokens=999)), parts)
    return Telling(SCRIPTS[kind](), parts, counts, num_events)


def chunks_of(cuts: Sequence[int], reason: str = "stop", text: str = TEXT) -> list[Chunk]:
    edges = [0, *sorted({cut % len(text) for cut in cuts} - {0}), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    return [
        Chunk(
            piece,
            [n] * len(piece),
            num_cached_tokens=0 if n == 0 else None,
            finish_reason=reason if n == len(pieces) - 1 else None,
            lengths=[1] * len(piece),
        )
        for n, piece in enumerate(pieces)
    ]


def told(kind: str, chunks: Sequence[Chunk]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all events, and the whole answer."""
    one = telling(kind)
    events = [event for chunk in chunks for event in one.take(chunk)]
    return events, one.script.whole()


def test_a_response_with_a_thought_a_text_and_calls() -> None:
    events, response = told("responses", chunks_of([]))
    assert response["status"] == "completed"
    thought, message, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": thought["content"][0]["text"]}]
    assert "你好" in thought["content"][0]["text"]
    assert message["content"][0]["text"].strip() == "I look."
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Oslo", "days": 3}] * 2
    assert len({item["id"] for item in response["output"]} | {call["call_id"] for call in calls}) == 6
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for item_kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"response.{item_kind}.delta" in kinds
        assert f"response.{item_kind}.done" in kinds
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]


def test_a_message_with_a_thought_a_text_and_calls() -> None:
    events, message = told("messages", chunks_of([]))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2]["input"] == {"city": "Oslo", "days": 3}
    assert message["stop_reason"] == "tool_use"
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    starts = [event["content_block"]["id"] for event in events if event.get("content_block", {}).get("id")]
    assert starts == [block["id"] for block in message["content"][2:]]


@pytest.mark.parametrize(("kind", "status"), [("responses", "incomplete"), ("messages", "max_tokens")])
def test_an_answer_that_was_cut_off_says_so(kind: str, status: str) -> None:
    _, whole = told(kind, chunks_of([], "length", "Only th"))
    assert (whole.get("status") or whole["stop_reason"]) == status
    if kind == "responses":
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["output"][-1]["status"] == "incomplete"


def test_a_stop_sequence_is_named() -> None:
    one = telling("messages")
    for _ in one.take(Chunk("Hi", [1], finish_reason="stop", stop_reason="zz", num_cached_tokens=0)):
        pass
    assert (one.script.whole()["stop_reason"], one.script.whole()["stop_sequence"]) == ("stop_sequence", "zz")


@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_answer_without_text_has_one_empty_part(kind: str) -> None:
    one = telling(kind)
    for _ in one.take(Chunk("", [1], finish_reason="stop", num_cached_tokens=0)):
        pass
    whole = one.script.whole()
    content = whole["content"] if kind == "messages" else whole["output"][0]["content"]
    assert [part["text"] for part in content] == [""]


@dataclass
class Batch:
    wire: bytes
    events: bytes
    num_events: int
    num_chars: int


def batches(noted: NotedTelling, chunks: Sequence[Chunk]) -> list[Batch]:
    found = []
    for chunk in chunks:
        wire = noted.take(chunk)
        if wire:
            first, note = take_note(wire)
            assert note is not None
            assert note.num_events == first.count(b"\n\n")
            found.append(Batch(wire, first, note.num_events, note.num_chars))
    return found


@pytest.mark.parametrize("kind", SCRIPTS)
@given(cuts=st.lists(st.integers(1, len(TEXT)), max_size=40), lost=st.integers(0, 40))
def test_another_engine_goes_on_with_the_very_events(kind: str, cuts: list[int], lost: int) -> None:
    chunks = chunks_of(cuts)
    whole = batches(NotedTelling(telling(kind), stream(0, 0)), chunks)
    count = lost % len(whole)
    kept = whole[:count]
    num_events, num_chars = sum(one.num_events for one in kept), kept[-1].num_chars if kept else 0
    rest: list[Chunk] = []
    position = 0
    for chunk in chunks:  # cut as before, so that nothing but the state decides what is told
        if position >= num_chars:
            shown = TEXT[:num_chars] if not rest else ""
            lengths = [1] * (len(shown) + len(chunk.text))
            token_ids = [0] * len(chunk.text)
            rest.append(Chunk(chunk.text, token_ids, None, None, chunk.finish_reason, shown=shown, lengths=lengths))
        position += len(chunk.text)
    again = batches(NotedTelling(telling(kind, num_events), stream(num_events, num_chars)), rest)
    assert without_counts(kept + again) == without_counts(whole)


def stream(num_events: int, num_chars: int) -> NotedStream:
    return NotedStream(StreamState(NUMBER, 5, num_events=num_events), (ShownChoice(num_chars),))


def without_counts(parts: Sequence[Batch]) -> list[Any]:
    """Return the events; of the usage only what was thought: the engine's scene knows nothing of the tokens before."""
    events = b"".join(part.events for part in parts).split(b"\n\n")[:-1]
    shaped = [json.loads(event.partition(b"data: ")[2]) for event in events]
    for event in shaped:
        for counted in (event, event.get("message", {}), event.get("response") or {}):
            if counted.get("usage"):
                counted["usage"] = counted["usage"].get("output_tokens_details")
            counted.pop("completed_at", None)
    return shaped


@pytest.mark.parametrize("kind", SCRIPTS)
@given(cuts=st.lists(st.integers(1, len(TEXT)), max_size=40))
def test_the_tokens_of_a_thought_do_not_depend_on_how_chunks_are_cut(kind: str, cuts: list[int]) -> None:
    _, whole = told(kind, chunks_of(cuts))
    (num_thought,) = whole["usage"]["output_tokens_details"].values()
    assert num_thought == len("Hm, 你好.\n</think>\n\n"), "from the first that shows to the last before the answer"


EMOJI = "😀 😁 😂"


@pytest.mark.parametrize("kind", SCRIPTS)
@given(cuts=st.lists(st.integers(1, 80), max_size=40))
def test_the_tokens_of_a_thought_are_counted_where_they_show_nothing_yet(kind: str, cuts: list[int]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = [decoder.decode(bytes([byte])) for byte in f"<think>\nHm, {EMOJI}.\n</think>\n\nYes.".encode()]
    edges = [0, *sorted({cut % len(pieces) for cut in cuts} - {0}), len(pieces)]
    chunks = [
        Chunk(
            "".join(pieces[start:end]),
            [0] * (end - start),
            num_cached_tokens=0 if start == 0 else None,
            finish_reason="stop" if end == len(pieces) else None,
            lengths=[len(piece) for piece in pieces[start:end]],
        )
        for start, end in itertools.pairwise(edges)
    ]
    _, whole = told(kind, chunks)
    (num_thought,) = whole["usage"]["output_tokens_details"].values()
    assert num_thought == len(f"Hm, {EMOJI}.\n</think>\n\n".encode()), "each byte is a token"
