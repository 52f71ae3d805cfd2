"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pagefleet_protocol.openai_chat import (
    AnswerCall,
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    read_chat_request,
)
from pagefleet_protocol.openai_forms import FORM, at_path
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.openai_responses import renamed
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.answer_parts import (
    TAIL_TOKENS,
    AnswerParts,
    AnswerPlan,
    WholeCall,
    plan_answer,
    whole_parts,
)
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.parts import Part
from pagefleet_engine.server.answers import Collected, prefixes
from pagefleet_engine.server.handoff import Handed
from pagefleet_engine.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs, token_names
from pagefleet_engine.server.route import GenerationRoute, Prepared, PreparedRoute, WholeFormat

Chat = TypeVar("Chat", bound=ChatRequest)


class ConversationRoute(PreparedRoute[Chat, AnswerPlan]):
    """Answers conversations, whichever API they come by."""

    names: Sequence[tuple[str, str]] = ()
    """Of a chat's fields, and what the API calls them; the first that is found counts."""

    async def prompts(self, handed: Handed[Chat]) -> list[list[int]]:
        """Render the conversation, or take a router's ids for it."""
        prompts, tenant = self._service.prompts, handed.head.tenant_salt
        if handed.prompt_ids is not None:
            return [await prompts.of_router(tenant, handed.prompt_ids, "messages")]
        kept = handed.body.kept_prompt_tokens(self._service.model.limits.max_model_len)
        return [await prompts.of_chat(tenant, handed.body.conversation, kept)]

    async def num_prompt_tokens(self, handed: Handed[Chat]) -> int:
        """Count the tokens of the conversation.

        Raises:
            InvalidRequest: it cannot be rendered, or is too long.
        """
        try:
            (prompt,) = await self.prompts(handed)
        except InvalidRequest as error:
            raise self.blaming(handed.body, error) from None
        return len(prompt)

    async def plan(self, handed: Handed[Chat], prompts: list[list[int]]) -> AnswerPlan:
        """Work out the form of the answer, and how its text is read."""
        family = self._service.family
        asked, tenant, tail = handed.body, handed.head.tenant_salt, ""
        if asked.callable_tools:
            await self._service.prompts.check_tools(tenant, asked.tools, asked.callable_tools)
        if family.thinking is not None:
            tail = await self._service.prompts.text_of(tenant, prompts[0][-TAIL_TOKENS:])
        return plan_answer(asked, family, tail, self._service.template_names)

    def blaming(self, asked: Chat, error: InvalidRequest) -> InvalidRequest:
        """Blame the tools, too, where the form holds their calls."""
        path = asked.form_path or ("tools" if asked.callable_tools else "")
        return renamed(at_path(error, FORM, path), self.names)

    def max_tokens_param(self, asked: Chat) -> str:
        """The name that the client used."""
        return asked.max_tokens_param


class ChatRoute(ConversationRoute[ChatRequest], GenerationRoute[ChatRequest, AnswerPlan]):
    """Answers OpenAI's chats."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Check a decoded body."""
        return read_chat_request(body, self._service.rules)

    async def form(self, prepared: Prepared[ChatRequest, AnswerPlan]) -> WholeFormat:
        """Return what writes the choices: the plain way where all text is content."""
        asked, plan = prepared.asked, prepared.plan
        shown = Shown(
            prepared.generation.sampling,
            token_names(self._service.tokenizer, asked.return_tokens_as_token_ids),
            prepared.generation.prompts[0] if asked.return_token_ids else None,
        )
        if plan.is_plain:
            return ChatFormat(shown)
        return PartsFormat(shown, plan.parts(prepared.head.id), asked.include_reasoning)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client wants to see of choices beside their messages."""

    sampling: SamplingParams
    """Says how many log-probabilities."""
    names: TokenNames
    prompt_token_ids: Sequence[int] | None = None
    """Shown, and those of each choice too; None: no ids are."""


class ChatFormat(WholeFormat):
    """Choices of chats; in a stream a role first, then text, then the finish reason alone."""

    def __init__(self, shown: Shown) -> None:
        self._before = prefixes(b'{"index":', b',"delta":{"content":', shown.sampling.n)
        self._shown = shown
        self._shows_ids = shown.prompt_token_ids is not None
        self._shows_text_alone = shown.sampling.logprobs is None and not self._shows_ids

    def opening(self, index: int, chunk: Chunk) -> bytes:
        """Return the role."""
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def beside_opening(self, index: int, chunk: Chunk) -> bytes:
        """Return what is told of the prompt, with the first choice."""
        beside: dict[str, Any] = {}
        if not index and self._shows_ids:
            beside["prompt_token_ids"] = self._shown.prompt_token_ids
        if not index and self._shown.sampling.prompt_logprobs is not None:
            beside["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs or (), self._shown.names)
        return b"," + msgspec.json.encode(beside)[1:-1] if beside else b""

    def content(self, index: int, chunk: Chunk) -> bytes | None:
        """Return new text with what is told of its tokens."""
        if not self._is_shown(chunk):
            return None
        text = msgspec.json.encode(chunk.text)
        if self._shows_text_alone:
            return self._before[index] + text + b'},"logprobs":null,"finish_reason":null}'
        return self._before[index] + text + b"}," + self._of_tokens(chunk) + b',"finish_reason":null}'

    def ending(self, index: int, chunk: Chunk) -> bytes:
        """Return the finish reason."""
        end = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        return b'{"index":%d,"delta":{},"logprobs":null,' % index + msgspec.json.encode(end)[1:]

    def whole(self, choices: list[Collected], head: Mapping[str, Any]) -> ChatCompletion:
        """Return the whole answer; a prompt of one token has log-probabilities of none."""
        scored = None
        if self._shown.sampling.prompt_logprobs is not None:
            scored = prompt_logprobs(choices[0].prompt_logprobs or [], self._shown.names)
        shaped = [self._choice(index, choice) for index, choice in enumerate(choices)]
        ids = self._shown.prompt_token_ids if self._shown.prompt_token_ids is not None else msgspec.UNSET
        return ChatCompletion(choices=shaped, prompt_logprobs=scored, prompt_token_ids=ids, **head)

    def _choice(self, index: int, choice: Collected) -> ChatChoice:
        message, reason = self._message(index, choice)
        top = self._shown.sampling.logprobs
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=reason,
            logprobs=None if top is None else chat_logprobs(choice.logprobs, top, self._shown.names),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._shows_ids else msgspec.UNSET,
        )

    def _is_shown(self, chunk: Chunk) -> bool:
        return bool(chunk.text or chunk.logprobs or (self._shows_ids and chunk.token_ids))

    def _of_tokens(self, chunk: Chunk) -> bytes:
        """Return the fields of a chunk's log-probabilities and token ids."""
        top, told = self._shown.sampling.logprobs, b'"logprobs":null'
        if top is not None:
            told = b'"logprobs":' + msgspec.json.encode(chat_logprobs(chunk.logprobs or (), top, self._shown.names))
        return told + b',"token_ids":' + msgspec.json.encode(list(chunk.token_ids)) if self._shows_ids else told

    def _message(self, index: int, choice: Collected) -> tuple[AnswerMessage, str]:
        return AnswerMessage(content="".join(choice.text)), choice.finish_reason


class PartsFormat(ChatFormat):
    """Choices of chats whose text is thoughts and calls too; what is held back to the end comes with its reason."""

    def __init__(self, shown: Shown, parts: AnswerParts, include_reasoning: bool) -> None:
        super().__init__(shown)
        self._parts = parts
        self._include_reasoning = include_reasoning
        self._read: dict[int, list[Part]] = defaultdict(list)
        """Of each choice of an answer that is not streamed."""

    @property
    def num_thought_tokens(self) -> int:
        """Of all choices so far."""
        return self._parts.num_thought_tokens

    def read(self, index: int, chunk: Chunk) -> None:
        """Take a chunk of an answer that is not streamed apart."""
        self._read[index] += self._parts.take(index, chunk)

    def content(self, index: int, chunk: Chunk) -> bytes | None:
        """Return the parts that new text adds, with the log-probabilities of all its tokens."""
        self._parts.restore(index, chunk)
        delta = self._delta(index, self._parts.take(index, chunk))
        if not delta and not (chunk.logprobs or (self._shows_ids and chunk.token_ids)):
            return None
        shown = msgspec.json.encode(delta)
        return b'{"index":%d,"delta":%b,%b,"finish_reason":null}' % (index, shown, self._of_tokens(chunk))

    def ending(self, index: int, chunk: Chunk) -> bytes:
        """Return the parts that were held back, and the finish reason."""
        parts, reason = self._parts.finish(index, chunk)
        end = msgspec.json.encode({"finish_reason": reason, "stop_reason": chunk.stop_reason})
        delta = msgspec.json.encode(self._delta(index, parts))
        return b'{"index":%d,"delta":%b,"logprobs":null,%b' % (index, delta, end[1:])

    def _delta(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        if not parts:
            return {}
        whole = whole_parts(parts)
        delta: dict[str, Any] = {}
        if whole.reasoning and self._include_reasoning:
            delta |= {"reasoning_content": whole.reasoning, "reasoning": whole.reasoning}
        if whole.content:
            delta["content"] = whole.content
        if whole.calls:
            delta["tool_calls"] = [self._call_delta(index, number, call) for number, call in whole.calls.items()]
        return delta

    def _call_delta(self, index: int, number: int, call: WholeCall) -> dict[str, Any]:
        if not call.name:
            return {"index": number, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": self._parts.call_id(index, number), "type": "function", "function": function}

    def _message(self, index: int, choice: Collected) -> tuple[AnswerMessage, str]:
        rest, reason = self._parts.finish(index, Chunk("", (), finish_reason=choice.finish_reason))
        whole = whole_parts([*self._read[index], *rest])
        calls = [
            AnswerCall(id=self._parts.call_id(index, number), function=CalledFunction(call.name, call.arguments))
            for number, call in whole.calls.items()
        ]
        reasoning = whole.reasoning if self._include_reasoning and whole.reasoning else msgspec.UNSET
        content = whole.content or (None if calls else "")
        message = AnswerMessage(
            content=content, tool_calls=calls or msgspec.UNSET, reasoning_content=reasoning, reasoning=reasoning
        )
        return message, reason
