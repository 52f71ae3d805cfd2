"""`POST /v1/completions`. Choice index = prompt index times `n` plus the answer's number."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from pagefleet_protocol.openai_completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    read_completion_request,
)
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.server.choices import Collected, TokenCounts, collect
from pagefleet_engine.server.continuation import NotedStream, answer_head, noted_stream, stream_answer
from pagefleet_engine.server.generation import Chunks, PreparedPrompt, jobs_of
from pagefleet_engine.server.handoff import Handed, check_one_text
from pagefleet_engine.server.logprobs import CompletionLogprobList, prompt_logprobs
from pagefleet_engine.server.ports import Chunk, Tokenizer
from pagefleet_engine.server.responses import WholeResponse
from pagefleet_engine.server.sampling import fitting_max_tokens, to_sampling_params
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.sse import AnswerHead, EventWriter, prefixes
from pagefleet_engine.server.transfers import check_one_prompt, prefill_response


class CompletionRoute:
    """Continues texts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Check and tokenize; the response generates.

        Raises:
            BodyError, InvalidRequest, HttpRefusal: the client's mistake.
        """
        service = self._service
        handed = await service.read_handed(request, read_completion_request)
        asked = handed.body
        arrival = service.arrival(request)
        service.check_model(asked.model)
        service.count_ignored(asked.ignored)
        salt = handed.head.salt_with(asked.cache_salt)
        num_choices = len(asked.prompts) * asked.sampling.n
        stream = noted_stream(handed, num_choices if asked.stream else 0, service.model.max_model_len)
        transfer = handed.head.transfer
        check_one_prompt(transfer, len(asked.prompts))
        prompts = await self._prepare(handed, stream)
        if transfer is not None and transfer.leg == "prefill":
            return prefill_response(service, transfer, prompts[0], asked.priority, salt, arrival)
        echoes = await self._echoes(asked, prompts)
        head = answer_head("cmpl", asked.model, stream)
        chunks = service.generate(jobs_of(head.id, prompts, asked.priority, salt, transfer), arrival)
        if not asked.stream:
            return WholeResponse(self._whole(head, asked, prompts, echoes, chunks), service.open_requests)
        choice = CompletionChoiceFormat(prompts, asked.logprobs, echoes, service.tokenizer)
        if asked.logprobs is not None and stream is not None:
            for index, shown in enumerate(stream.choices):
                if shown.so_far is not None:
                    choice.begin_at(index, await service.prompts.offset_after(shown.so_far.token_ids))
        writer = EventWriter("text_completion", head, choice, TokenCounts(prompts), asked.stream_options)
        return stream_answer(service, chunks, writer, stream)

    async def _prepare(self, handed: Handed[CompletionRequest], stream: NotedStream | None) -> list[PreparedPrompt]:
        asked, model, prompts = handed.body, self._service.model, self._service.prompts
        scored = asked.sampling.prompt_logprobs
        if asked.echo and asked.logprobs is not None:
            scored = max(asked.logprobs, scored or 0)
        if handed.prompt_ids is None:
            token_ids = await prompts.of_completion(asked.prompts, asked.add_special_tokens)
        else:
            check_one_text(asked.prompts)
            token_ids = [prompts.of_router(handed.prompt_ids, "prompt")]
        max_tokens = fitting_max_tokens(asked.max_tokens, max(map(len, token_ids)), model, "max_tokens")
        # One for all prompts: its lists may be long, and there may be a thousand prompts.
        sampling = await prompts.spell(to_sampling_params(asked.sampling, model, max_tokens, asked.logprobs, scored))
        n = sampling.n
        return [
            PreparedPrompt(ids, sampling, stream.so_far(n * i, n * (i + 1)) if stream else ())
            for i, ids in enumerate(token_ids)
        ]

    async def _echoes(self, asked: CompletionRequest, prompts: Sequence[PreparedPrompt]) -> list[str]:
        """Return what stands before each prompt's answers: the prompt as given, or nothing."""
        if not asked.echo:
            return [""] * len(prompts)
        return [
            given if isinstance(given, str) else await self._service.prompts.text_of(prompt.token_ids)
            for given, prompt in zip(asked.prompts, prompts, strict=True)
        ]

    async def _whole(
        self,
        head: AnswerHead,
        asked: CompletionRequest,
        prompts: Sequence[PreparedPrompt],
        echoes: Sequence[str],
        chunks: Chunks,
    ) -> AsyncGenerator[bytes, None]:
        choices, usage = await collect(chunks, prompts)
        n = asked.sampling.n
        shaped = []
        for i, choice in enumerate(choices):
            prompt = _ScoredPrompt(prompts[i // n].token_ids, choices[i - i % n].prompt_logprobs or [], echoes[i // n])
            shaped.append(self._choice(i, choice, asked, prompt))
        answer = Completion(id=head.id, created=head.created, model=head.model, choices=shaped, usage=usage)
        yield msgspec.json.encode(answer)

    def _choice(
        self, index: int, choice: Collected, asked: CompletionRequest, prompt: _ScoredPrompt
    ) -> CompletionChoice:
        tokenizer = self._service.tokenizer
        scored: list[dict[str, Any] | None] | None = None
        if asked.sampling.prompt_logprobs is not None:
            scored = prompt_logprobs(prompt.logprobs, tokenizer)
        return CompletionChoice(
            index=index,
            text=prompt.echo + "".join(choice.text),
            finish_reason=choice.finish_reason,
            logprobs=_logprobs(choice, asked, prompt, tokenizer),
            stop_reason=choice.stop_reason,
            prompt_logprobs=scored,
        )


class CompletionChoiceFormat:
    """Choices of a streamed `text_completion`: the echo first, if asked for, then text; the last has the reason."""

    def __init__(
        self, prompts: Sequence[PreparedPrompt], logprobs: int | None, echoes: Sequence[str], tokenizer: Tokenizer
    ) -> None:
        self._before = prefixes(b'{"index":', b',"text":', prompts)
        self._echoes = [echo for echo, prompt in zip(echoes, prompts, strict=True) for _ in range(prompt.sampling.n)]
        self._lists: list[CompletionLogprobList] | None = None
        if logprobs is not None:
            self._lists = [CompletionLogprobList(logprobs, tokenizer) for _ in self._before]

    def begin_at(self, index: int, offset: int) -> None:
        """Count the characters of a choice's tokens from `offset` on, which the answer has already."""
        if self._lists is not None:
            self._lists[index].offset = offset

    def opening(self, index: int) -> bytes | None:
        """Return the echo, if there is one."""
        echo = self._echoes[index]
        if not echo:
            return None
        return self._before[index] + msgspec.json.encode(echo) + b',"logprobs":null,"finish_reason":null}'

    def content(self, index: int, chunk: Chunk) -> bytes:
        """Return new text, its log-probabilities, and the finish reason of the last chunk."""
        logprobs = b"null"
        if self._lists is not None:
            growing = self._lists[index]
            growing.add(chunk.logprobs or ())
            logprobs = msgspec.json.encode(growing.take())
        end = b',"finish_reason":null}'
        if chunk.finish_reason is not None:
            reasons = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            end = b"," + msgspec.json.encode(reasons)[1:]
        return self._before[index] + msgspec.json.encode(chunk.text) + b',"logprobs":' + logprobs + end

    def ending(self, index: int, chunk: Chunk) -> bytes | None:
        """Return None: the last text carries the reason."""
        return None


class _ScoredPrompt(msgspec.Struct, frozen=True):
    """A prompt as its choices echo it."""

    token_ids: list[int]
    logprobs: list[Any]
    echo: str


def _logprobs(
    choice: Collected, asked: CompletionRequest, prompt: _ScoredPrompt, tokenizer: Tokenizer
) -> CompletionLogprobs | None:
    if asked.logprobs is None:
        return None
    growing = CompletionLogprobList(asked.logprobs, tokenizer)
    if asked.echo:
        growing.add_unscored(prompt.token_ids[0])
        growing.add(prompt.logprobs)
    growing.add(choice.logprobs)
    return growing.take()
