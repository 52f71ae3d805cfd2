"""The answer to a chat: how it is to be made, and the parts of it, whatever API writes them.

The model's family says what its text means (`parsers`); a plan says what the request asks of the family: which form
holds calls, where the thought ends. Parts come as the text does, and depend on all of a choice's text so far alone, so
another engine, which is given that text, goes on with the same parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
from pagefleet_protocol.openai_chat import ChatRequest
from pagefleet_protocol.openai_common import unsupported
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_protocol.structured_outputs import StructuredOutputsParams
from pagefleet_protocol.thinking import Thinking

from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.family import AnswerFamily
from pagefleet_engine.parsers.parts import AnswerParser, CallArguments, CallBegins, Content, Part, Reasoning, Tool
from pagefleet_engine.parsers.reading import merged

TAIL_TOKENS = 64
"""Of a prompt, that show whether it opens a thought."""
_EFFORT_NAMES = frozenset({"reasoning_effort", "enable_thinking", "thinking"})
_EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}
"""Tokens of a thought where the chat template knows no effort; of a higher one there is no limit."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What a request asks of a family's answer."""

    sampling: SamplingParams
    """With the form and the thought."""
    family: AnswerFamily
    tools: tuple[Tool, ...]
    """That the answer may call."""
    opened_thought: bool
    """Whether the prompt ends within a thought."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.tools and self.family.thinking is None

    def parts(self, answer_id: str) -> AnswerParts:
        """Return what takes the text of each choice apart."""
        num_choices = self.sampling.n
        return AnswerParts([self.family.parser(self.tools, self.opened_thought) for _ in range(num_choices)], answer_id)


def plan_answer(
    asked: ChatRequest, family: AnswerFamily, prompt_tail: str, template_names: frozenset[str]
) -> AnswerPlan:
    """Work out how a chat is answered.

    Args:
        asked: the request.
        family: of the model.
        prompt_tail: the end of its prompt's text, looked at where the family thinks.
        template_names: what the model's chat template reads.

    Raises:
        InvalidRequest: the family can do nothing of the kind, or cannot hold it; with the field's path.
    """
    tools = tuple(Tool(tool.name, tool.parameters or {}) for tool in asked.callable_tools)
    if tools and not family.calls_tools:
        raise unsupported("tools", "This model's chat template shows no calls; the server needs --tool-call-parser.")
    opened = _opens_thought(asked, family, prompt_tail)
    budget = _thinking_budget(asked, family, template_names)
    changes: dict[str, Any] = {"thinking": _thinking(asked, family, opened, prompt_tail, budget)}
    if tools:
        changes["structured_outputs"] = _form_with_calls(asked, family, tools)
    elif asked.sampling.structured_outputs is not None:
        own = _as_format(asked.sampling.structured_outputs)
        if (placed := family.content(own)) is not own:
            _check_options(asked.sampling.structured_outputs)
            changes["structured_outputs"] = _tag_of(placed)
    if tools or family.thinking:
        changes["skip_special_tokens"] = False
    return AnswerPlan(msgspec.structs.replace(asked.sampling, **changes), family, tools, opened)


def _opens_thought(asked: ChatRequest, family: AnswerFamily, prompt_tail: str) -> bool:
    if family.thinking is None:
        return False
    if asked.conversation.continue_final_message:
        text = asked.messages[-1].content or ""
        return text.rfind(family.thinking.begin) > text.rfind(family.thinking.end)
    return prompt_tail.rstrip().endswith(family.thinking.begin.strip())


def _thinking_budget(asked: ChatRequest, family: AnswerFamily, template_names: frozenset[str]) -> int | None:
    """Return the tokens that a thought may have: as asked for, or as the effort comes to where no template knows it."""
    budget, effort = asked.thinking_budget, asked.conversation.reasoning_effort
    if family.thinking is None:
        if budget:
            raise unsupported("thinking_token_budget", "This model does not think.")
        if effort not in (None, "none") and not template_names & _EFFORT_NAMES:
            raise unsupported("reasoning_effort", "This model does not think.")
        return None
    if budget is None and effort is not None and "reasoning_effort" not in template_names:
        return _EFFORT_BUDGETS.get(effort)
    return budget


def _thinking(
    asked: ChatRequest, family: AnswerFamily, opened: bool, prompt_tail: str, budget: int | None
) -> Thinking | None:
    """Return where the thought ends, for the core: it must know where a form or a budget is in force."""
    markers = family.thinking
    if markers is None or (not opened and prompt_tail.rstrip().endswith(markers.end.strip())):
        return None
    if budget is None and not (asked.callable_tools or asked.sampling.structured_outputs):
        return None
    return Thinking(end=markers.end, opened=opened, start=markers.begin, budget=budget)


def _form_with_calls(asked: ChatRequest, family: AnswerFamily, tools: Sequence[Tool]) -> StructuredOutputsParams:
    """Return the form of an answer with calls; where a form of its own is asked for, it is that or calls."""
    own, choice = asked.sampling.structured_outputs, asked.tool_choice.mode
    must_call = choice == "required"
    calls = family.structure(tools, "required" if must_call or own else "auto", asked.parallel_tool_calls, True)
    if own is not None and not must_call:
        _check_options(own)
        calls = {"type": "or", "elements": [calls, family.content(_as_format(own))]}
    return _tag_of(calls)


def _check_options(form: StructuredOutputsParams) -> None:
    """Refuse what cannot be said of a form that is part of a structural tag."""
    remedies = {
        "disable_additional_properties": "Say 'additionalProperties': false in the schema.",
        "whitespace_pattern": "Leave it out, or send 'disable_any_whitespace'.",
    }
    for name, remedy in remedies.items():
        if getattr(form, name) not in (None, False):
            why = "Beside this answer's calls or channels the form cannot have it."
            raise unsupported(f"structured_outputs.{name}", f"{why} {remedy}")


def _tag_of(form: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def _as_format(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return a form as a part of a structural tag."""
    match form.form:
        case "json" | "json_object":
            schema = {"type": "object"} if form.json_object else msgspec.json.decode(form.json_text)
            tight = {"max_whitespace_cnt": 0} if form.disable_any_whitespace else {}
            return {"type": "json_schema", "json_schema": schema, **tight}
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in form.choice or ()]
            return {"type": "or", "elements": texts}
        case _:
            own: dict[str, Any] = msgspec.json.decode(form.json_text)["format"]
            return own


class AnswerParts:
    """Takes the choices of one answer apart.

    Args:
        parsers: one for each choice.
        answer_id: of the answer, from which those of its calls are made.
    """

    def __init__(self, parsers: Sequence[AnswerParser], answer_id: str) -> None:
        self._parsers = parsers
        self._answer_id = answer_id
        self._calls = [False] * len(parsers)
        self._thinks = [False] * len(parsers)
        self.num_thought_tokens = 0
        """Of all choices: tokens that show some of a thought, or come within one."""

    def restore(self, index: int, chunk: Chunk) -> list[Part]:
        """Return the parts of what another engine has shown of a choice; to be called before `take`."""
        return self._feed(index, chunk.shown, _lengths_of_shown(chunk)) if chunk.shown else []

    def take(self, index: int, chunk: Chunk) -> list[Part]:
        """Return the parts that a chunk's text adds to a choice."""
        return self._feed(index, chunk.text, chunk.lengths[len(_lengths_of_shown(chunk)) :])

    def finish(self, index: int, chunk: Chunk) -> tuple[list[Part], str]:
        """Return the parts that were held back to the end of a choice, and its finish reason."""
        parts = self._note(index, self._parsers[index].finish())
        reason = chunk.finish_reason or ""
        return parts, "tool_calls" if reason == "stop" and self._calls[index] else reason

    def call_id(self, index: int, call: int) -> str:
        """Return the id of a choice's call, the same wherever the answer goes on."""
        return f"call_{hashlib.sha256(f'{self._answer_id} {index} {call}'.encode()).hexdigest()[:24]}"

    def _feed(self, index: int, text: str, lengths: Sequence[int]) -> list[Part]:
        """Take the text of tokens, each by itself, so that those of a thought are the same however chunks were cut."""
        parts: list[Part] = []
        start = 0
        for length in lengths:
            added = self._note(index, self._parsers[index].feed(text[start : start + length])) if length else []
            self.num_thought_tokens += self._thinks[index] or any(type(part) is Reasoning for part in added)
            parts += added
            start += length
        if start < len(text):
            parts += self._note(index, self._parsers[index].feed(text[start:]))
        return merged(parts) if len(lengths) > 1 else parts

    def _note(self, index: int, parts: list[Part]) -> list[Part]:
        if parts:
            self._calls[index] = self._calls[index] or any(type(part) is CallBegins for part in parts)
            self._thinks[index] = type(parts[-1]) is Reasoning
        return parts


def _lengths_of_shown(chunk: Chunk) -> Sequence[int]:
    """Return the lengths of the tokens that the caller has seen: up to where their text ends, as notes do."""
    if not chunk.shown:
        return ()
    ends = accumulate(chunk.lengths)
    return chunk.lengths[: next((n for n, end in enumerate(ends, 1) if end >= len(chunk.shown)), len(chunk.lengths))]


@dataclass(slots=True)
class WholeCall:
    """A call with all of its arguments."""

    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class WholeParts:
    """All parts of a choice, or of one event of it, by kind."""

    reasoning: str
    content: str
    calls: dict[int, WholeCall]
    """By index; the name is empty where the call began earlier."""


def whole_parts(parts: Iterable[Part]) -> WholeParts:
    """Join parts by kind."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, WholeCall] = {}
    for part in parts:
        match part:
            case Content():
                content.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegins():
                calls[part.index] = WholeCall(part.name)
            case CallArguments():
                calls.setdefault(part.index, WholeCall("")).arguments += part.text
    return WholeParts("".join(reasoning), "".join(content), calls)
