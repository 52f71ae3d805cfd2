"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
from pagefleet_protocol.openai_chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    read_chat_request,
)
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.server.choices import Collected, TokenCounts, collect
from pagefleet_engine.server.continuation import NotedStream, answer_head, noted_stream, stream_answer
from pagefleet_engine.server.generation import Chunks, PreparedPrompt, jobs_of
from pagefleet_engine.server.handoff import Handed
from pagefleet_engine.server.logprobs import chat_logprobs, prompt_logprobs
from pagefleet_engine.server.ports import Chunk, Tokenizer
from pagefleet_engine.server.responses import WholeResponse
from pagefleet_engine.server.sampling import fitting_max_tokens, to_sampling_params
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.sse import AnswerHead, EventWriter, prefixes
from pagefleet_engine.server.transfers import prefill_response


class ChatRoute:
    """Answers conversations."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Check, render and tokenize; the response generates.

        Raises:
            BodyError, InvalidRequest, HttpRefusal: the client's mistake.
        """
        service = self._service
        handed = await service.read_handed(request, read_chat_request)
        chat = handed.body
        arrival = service.arrival(request)
        service.check_model(chat.model)
        service.count_ignored(chat.ignored)
        salt = handed.head.salt_with(chat.cache_salt)
        stream = noted_stream(handed, chat.sampling.n if chat.stream else 0, service.model.max_model_len)
        prompt = await self._prepare(handed, stream)
        transfer = handed.head.transfer
        if transfer is not None and transfer.leg == "prefill":
            return prefill_response(service, transfer, prompt, chat.priority, salt, arrival)
        head = answer_head("chatcmpl", chat.model, stream)
        chunks = service.generate(jobs_of(head.id, [prompt], chat.priority, salt, transfer), arrival)
        if not chat.stream:
            return WholeResponse(self._whole(chat, head, prompt, chunks), service.open_requests)
        choice = ChatChoiceFormat([prompt], chat, service.tokenizer)
        writer = EventWriter("chat.completion.chunk", head, choice, TokenCounts([prompt]), chat.stream_options)
        return stream_answer(service, chunks, writer, stream)

    async def _prepare(self, handed: Handed[ChatRequest], stream: NotedStream | None) -> PreparedPrompt:
        chat, prompts = handed.body, self._service.prompts
        if handed.prompt_ids is None:
            ids = await prompts.of_chat(chat.messages, chat.add_generation_prompt)
        else:
            ids = prompts.of_router(handed.prompt_ids, "messages")
        max_tokens = fitting_max_tokens(chat.max_tokens, len(ids), self._service.model, chat.max_tokens_param)
        logprobs = chat.top_logprobs if chat.logprobs else None
        sampling = to_sampling_params(
            chat.sampling, self._service.model, max_tokens, logprobs, chat.sampling.prompt_logprobs
        )
        return PreparedPrompt(ids, await prompts.spell(sampling), stream.so_far(0, sampling.n) if stream else ())

    async def _whole(
        self, chat: ChatRequest, head: AnswerHead, prompt: PreparedPrompt, chunks: Chunks
    ) -> AsyncGenerator[bytes, None]:
        choices, usage = await collect(chunks, [prompt])
        asked = choices[0].prompt_logprobs
        if chat.sampling.prompt_logprobs is not None and asked is None:
            asked = []  # a prompt of one token has none
        answer = ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(i, choice, chat) for i, choice in enumerate(choices)],
            usage=usage,
            prompt_logprobs=None if asked is None else prompt_logprobs(asked, self._service.tokenizer),
        )
        yield msgspec.json.encode(answer)

    def _choice(self, index: int, choice: Collected, chat: ChatRequest) -> ChatChoice:
        tokenizer = self._service.tokenizer
        logprobs = chat_logprobs(choice.logprobs, chat.top_logprobs, tokenizer) if chat.logprobs else None
        return ChatChoice(
            index=index,
            message=AnswerMessage("".join(choice.text)),
            finish_reason=choice.finish_reason,
            logprobs=logprobs,
            stop_reason=choice.stop_reason,
        )


class ChatChoiceFormat:
    """Choices of `chat.completion.chunk`: a role first, then text, then the finish reason alone."""

    def __init__(self, prompts: Sequence[PreparedPrompt], chat: ChatRequest, tokenizer: Tokenizer) -> None:
        self._before = prefixes(b'{"index":', b',"delta":{"content":', prompts)
        self._top = chat.top_logprobs if chat.logprobs else None
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        """Return the role."""
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def content(self, index: int, chunk: Chunk) -> bytes:
        """Return new text with its log-probabilities."""
        text = msgspec.json.encode(chunk.text)
        if self._top is None:
            return self._before[index] + text + b'},"logprobs":null,"finish_reason":null}'
        logprobs = msgspec.json.encode(chat_logprobs(chunk.logprobs or (), self._top, self._tokenizer))
        return self._before[index] + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}'

    def ending(self, index: int, chunk: Chunk) -> bytes:
        """Return the finish reason."""
        end = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        return b'{"index":%d,"delta":{},"logprobs":null,' % index + msgspec.json.encode(end)[1:]
