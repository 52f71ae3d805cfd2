"""`POST /v1/responses`: a response with its client, or one in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from pagefleet_protocol.handoff import encode_prompt
from pagefleet_protocol.openai_chat import ChatRequest
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.openai_responses import CHAT_NAMES, ResponsesRequest, chat_request, read_responses_request
from pagefleet_protocol.responses_items import Item
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.answer_parts import AnswerPlan
from pagefleet_engine.client.stream import Chunks
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import ContextTooLong
from pagefleet_engine.server.answer_script import NotedTelling, Telling, tell_events, tell_whole, telling_of
from pagefleet_engine.server.answers import AnswerHead
from pagefleet_engine.server.chat import ConversationRoute
from pagefleet_engine.server.continuation import NotedStream
from pagefleet_engine.server.handoff import Handed
from pagefleet_engine.server.logprobs import chat_logprobs
from pagefleet_engine.server.responses import ApiEvents, WholeResponse, json_response
from pagefleet_engine.server.responses_api.response import Logprobs, ResponseHead, ResponseScript
from pagefleet_engine.server.responses_api.shelf import BackgroundResponse, ResponseShelf, with_ids
from pagefleet_engine.server.responses_api.store import StoredResponse
from pagefleet_engine.server.route import Prepared, is_prefill, prefill_response
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.tracing import Arrival

_MANY_ITEMS = 256
"""So many take long enough to read that a thread does it."""

Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""Stores a response that is complete."""


_UNSEEN: Item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]}
"""What another engine's store has, where the prompt of it is known."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request with all that it refers to."""

    handed: Handed[ResponsesRequest]
    earlier: Sequence[Item]
    refers: bool
    """Whether its prompt is made of stored responses."""
    is_stored: bool
    arrival: Arrival

    @property
    def body(self) -> ResponsesRequest:
        return self.handed.body

    def prompt_note(self, prepared: Prepared[ChatRequest, AnswerPlan]) -> bytes:
        """Return what tells a router the prompt, where only this engine can make it."""
        if prepared.stream is None or not self.refers or self.handed.prompt_ids is not None:
            return b""
        return encode_prompt(prepared.generation.prompts[0])


class ResponsesRoute(ConversationRoute[ChatRequest]):
    """Makes responses, which are chats with another form.

    Args:
        service: see GenerationRoute.
        shelf: of those that are stored.
    """

    names = CHAT_NAMES

    def __init__(self, service: Service, shelf: ResponseShelf) -> None:
        super().__init__(service)
        self._shelf = shelf

    async def create(self, request: Request) -> Response:
        """Answer, or begin to.

        Raises:
            InvalidRequest, HttpRefusal: the client's mistake.
        """
        handed = await self._service.bodies.read(request, read_responses_request)
        self._service.check_model(handed.body.model)
        asked = await self._resolved(handed, self._service.arrival(request))
        prepared = await self._prepared(asked)
        if is_prefill(prepared.generation):
            return prefill_response(self._service, prepared.generation, prepared.arrival)
        return await self._answered(asked, prepared)

    def head(self, asked: ChatRequest, stream: NotedStream | None) -> AnswerHead:
        """Return what the response is called."""
        if stream is not None:
            return AnswerHead(f"resp_{stream.state.answer_id}", stream.state.created, asked.model)
        return AnswerHead(f"resp_{self._shelf.new_number()}", int(time.time()), asked.model)

    async def count(self, request: Request) -> Response:
        """Return how many tokens the input of a response has: `/v1/responses/input_tokens`."""
        handed = await self._service.bodies.read(request, read_responses_request, is_handed=False)
        self._service.check_model(handed.body.model)
        asked = await self._resolved(handed, self._service.arrival(request))
        chat = await self._chat(asked, 0)
        num_tokens = await self.num_prompt_tokens(handed.of(chat))
        return json_response(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": num_tokens}))

    async def _resolved(self, handed: Handed[ResponsesRequest], arrival: Arrival) -> _Asked:
        """Get what the input refers to."""
        asked, owner = handed.body, handed.head.asker.owner
        if not self._shelf.keeps and (asked.store or asked.background or asked.previous_response_id):
            name = "store" if asked.store else "background" if asked.background else "previous_response_id"
            message = f"Unsupported parameter: '{name}'. This server stores no responses."
            raise InvalidRequest(message, name, "unsupported_parameter")
        previous, max_bytes = asked.previous_response_id, self._service.bodies.max_bytes
        references = [item["id"] for item in asked.items if item["type"] == "item_reference"]
        refers = previous is not None or bool(references)
        if handed.prompt_ids is not None:  # a router brings what another engine has made of its own store
            earlier, found = [] if previous is None else [_UNSEEN], [_UNSEEN] * len(references)
        else:
            earlier = [] if previous is None else await self._shelf.before(owner, previous, max_bytes)
            found = await self._shelf.items(owner, references, max_bytes) if references else []
        resolved = iter(found)
        items = tuple(next(resolved) if item["type"] == "item_reference" else item for item in asked.items)
        handed = replace(handed, body=msgspec.structs.replace(asked, items=items))
        return _Asked(handed, earlier, refers, self._shelf.keeps and asked.store is not False, arrival)

    async def _chat(self, asked: _Asked, num_dropped: int) -> ChatRequest:
        read = partial(chat_request, asked.body, self._service.rules, asked.earlier, num_dropped)
        chat = await asyncio.to_thread(read) if len(asked.earlier) + len(asked.body.items) > _MANY_ITEMS else read()
        return msgspec.structs.replace(chat, stream=asked.body.stream)

    async def _prepared(self, asked: _Asked) -> Prepared[ChatRequest, AnswerPlan]:
        """Prepare the chat; where it may be truncated, with as few of the oldest items left out as make it fit."""
        try:
            return await self._prepared_from(asked, 0)
        except InvalidRequest as error:
            if not asked.body.truncates or not _is_too_long(error):
                raise
        starts = _starts([*asked.earlier, *asked.body.items])
        best: Prepared[ChatRequest, AnswerPlan] | None = None
        low, high = 0, len(starts) - 1
        while low <= high:
            middle = (low + high) // 2 if best is not None or low else high  # the shortest first: it must fit
            try:
                best = await self._prepared_from(asked, starts[middle])
            except InvalidRequest as error:
                if best is None or not _is_too_long(error):
                    raise
                low = middle + 1
            else:
                high = middle - 1
        if best is None:
            raise ContextTooLong("The input is longer than the context, and has no older items to drop.", "input")
        return best

    async def _prepared_from(self, asked: _Asked, num_dropped: int) -> Prepared[ChatRequest, AnswerPlan]:
        handed = asked.handed.of(await self._chat(asked, num_dropped))
        if num_dropped:
            handed = replace(handed, prompt_ids=None)
        if asked.body.background:
            handed = replace(handed, head=replace(handed.head, stream=None))  # it ends with this engine
        return await self.prepare(handed, asked.arrival)

    async def _answered(self, asked: _Asked, prepared: Prepared[ChatRequest, AnswerPlan]) -> Response:
        service, body = self._service, asked.body
        number = prepared.head.id.removeprefix("resp_")
        head = ResponseHead(number, prepared.head.created, body, prepared.asked, asked.is_stored)
        script = ResponseScript(head, self._logprobs(prepared))
        telling = telling_of(script, prepared)
        chunks = self.generate(prepared)
        stored = StoredResponse(
            id=head.id,
            previous=body.previous_response_id,
            is_running=True,
            response=head.response("queued"),
            items=with_ids(body.items, number),
        )
        owner = asked.handed.head.asker.owner
        if body.background:
            background = BackgroundResponse(telling, body.stream)
            await self._shelf.start(owner, stored, background, chunks)
            if body.stream:
                return ApiEvents(background.follow(-1), service.open_requests)
            return json_response(msgspec.json.encode(background.response))

        async def keep(response: dict[str, Any]) -> None:
            if asked.is_stored:
                await self._shelf.keep(owner, replace(stored, response=response, is_running=False))

        if not body.stream:
            return WholeResponse(_whole(telling, chunks, keep), service.open_requests)
        noted = NotedTelling(telling, prepared.stream)
        events = _events(noted, chunks, script, keep, asked.prompt_note(prepared))
        return ApiEvents(events, service.open_requests, script)

    def _logprobs(self, prepared: Prepared[ChatRequest, AnswerPlan]) -> Logprobs:
        top, tokenizer = prepared.generation.sampling.logprobs, self._service.tokenizer

        def shaped(chunk: Chunk) -> list[Any]:
            return [] if top is None or not chunk.logprobs else chat_logprobs(chunk.logprobs, top, tokenizer).content

        return shaped


def _is_too_long(error: InvalidRequest) -> bool:
    return isinstance(error, ContextTooLong) or (error.param, error.code) == ("input", "array_above_max_length")


def _starts(items: Sequence[Item]) -> list[int]:
    """Return where a conversation may begin: behind there, no output is of a call before."""
    outputs: dict[str, int] = {}
    answered = [0] * len(items)
    for n in reversed(range(len(items))):
        item = items[n]
        if item["type"] == "function_call_output":
            outputs[item["call_id"]] = n
        elif item["type"] == "function_call":
            answered[n] = outputs.get(item["call_id"], 0)
    last = accumulate(answered, max, initial=0)
    return [n for n, until in enumerate(last) if until < n < len(items) and items[n]["type"] != "function_call_output"]


async def _whole(telling: Telling, chunks: Chunks, keep: Keep) -> AsyncGenerator[bytes, None]:
    response = await tell_whole(telling, chunks)
    await keep(response)
    yield msgspec.json.encode(response)


async def _events(
    noted: NotedTelling, chunks: Chunks, script: ResponseScript, keep: Keep, first: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the events, behind what comes first; a response is stored before its client hears that it is complete."""
    async with aclosing(tell_events(noted, chunks)) as pieces:
        async for events, is_last in pieces:
            if is_last:
                await keep(script.whole())
            yield first + events
            first = b""
