"""The way of a generating request through the server, the same for both routes: read, check, prepare, answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvHandoffError, KvTransfer, decode_kv_transfer
from pagefleet_protocol.openai_common import CommonFields
from pagefleet_protocol.openai_forms import FORM, at_path
from pagefleet_protocol.sampling_params import SamplingParams
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.server.answers import AnswerHead, ChoiceFormat, Collected, EventWriter, TokenCounts
from pagefleet_engine.server.continuation import NotedStream, answer_head, noted_stream, stream_answer
from pagefleet_engine.server.handoff import Handed
from pagefleet_engine.server.middleware import new_id
from pagefleet_engine.server.responses import WholeResponse
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.tracing import Arrival

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class TransferReader:
    """Reads the header for one start of an engine of the fleet."""

    key: FleetKey
    incarnations: Sequence[str]
    """Of each of its cores: the header is for one of them."""

    def read(self, headers: Headers) -> KvTransfer | None:
        """Return what the header says; None where there is none.

        Raises:
            KvHandoffError: it comes twice, or no router of this fleet wrote it for this engine.
        """
        values = headers.getlist(KV_TRANSFER)
        if len(values) > 1:
            raise KvHandoffError(f"{KV_TRANSFER} comes more than once")
        return decode_kv_transfer(values[0], self.key, *self.incarnations) if values else None


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What the prefill leg answers once the prompt is computed."""

    transfer_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of them, found in this engine's cache."""


def check_one_prompt(transfer: KvTransfer | None, num_prompts: int) -> None:
    """Refuse a leg for several prompts: a transfer has the K/V of one.

    Raises:
        InvalidRequest: there are more.
    """
    if transfer is not None and num_prompts != 1:
        raise InvalidRequest(f"{KV_TRANSFER} goes with one prompt.", None, "invalid_handoff")


def is_prefill(asked: Generation) -> bool:
    """Whether another engine answers, and only K/V is to be computed."""
    return asked.transfer is not None and asked.transfer.leg == "prefill"


def prefill_response(service: Service, asked: Generation, arrival: Arrival) -> WholeResponse:
    """Return the answer of a prefill leg, which computes the prompt when it is sent."""
    leg = replace(asked, request_id=new_id("prefill"), sampling=ONE_TOKEN)
    return WholeResponse(_answer(leg, service.generate(leg, arrival)), service.open_requests)


async def _answer(leg: Generation, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    num_cached = 0
    async with aclosing(chunks):
        async for _, chunk in chunks:
            num_cached += chunk.num_cached_tokens or 0
    assert leg.transfer is not None
    yield msgspec.json.encode(PrefillAnswer(leg.transfer.transfer_id, leg.num_prompt_tokens, num_cached))


class Plan(Protocol):
    """How an answer is to be made; routes know more of their own."""

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of each prompt."""
        ...


Asked = TypeVar("Asked", bound=CommonFields)
PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Asked, PlanT]):
    """A request that was checked, rendered and tokenized."""

    handed: Handed[Asked]
    plan: PlanT
    head: AnswerHead
    generation: Generation
    stream: NotedStream | None
    """What a router asks of the stream, if the answer is one."""
    arrival: Arrival

    @property
    def asked(self) -> Asked:
        """The body."""
        return self.handed.body


class PreparedRoute(ABC, Generic[Asked, PlanT]):
    """Checks, renders and tokenizes one kind of body, whatever becomes of it."""

    id_prefix: str

    def __init__(self, service: Service) -> None:
        self._service = service

    async def prepare(self, handed: Handed[Asked], arrival: Arrival) -> Prepared[Asked, PlanT]:
        """Check against the model, render and tokenize.

        Raises:
            InvalidRequest, HttpRefusal: the client's mistake.
        """
        service = self._service
        asked, head = handed.body, handed.head
        service.check_model(asked.model)
        service.count_ignored(asked.ignored)
        salt = head.salt_with(asked.cache_salt)
        num_choices = self.num_prompts(asked) * asked.sampling.n
        stream = noted_stream(handed, num_choices if asked.stream else 0, service.model.limits.max_model_len)
        check_one_prompt(head.transfer, self.num_prompts(asked))
        try:
            prompts = await self.prompts(handed)
            plan = await self.plan(handed, prompts)
            sampling = await service.prompts.parameters(
                head.tenant_salt, plan.sampling, max(map(len, prompts)), self.max_tokens_param(asked)
            )
        except InvalidRequest as error:
            raise self.blaming(asked, error) from None
        answer = self.head(asked, stream)
        so_far = stream.so_far() if stream else ()
        priority = head.priority(asked.priority)
        beams = self._beams(asked, sampling, prompts)
        generation = Generation(answer.id, prompts, sampling, priority, salt, so_far, head.transfer, beams)
        return Prepared(handed, plan, answer, generation, stream, arrival)

    def head(self, asked: Asked, stream: NotedStream | None) -> AnswerHead:
        """Return what the answer is called."""
        return answer_head(self.id_prefix, asked.model, stream)

    def _beams(self, asked: Asked, sampling: SamplingParams, prompts: Sequence[list[int]]) -> BeamSearchParams | None:
        if asked.beam_length_penalty is None:
            return None
        room = self._service.model.limits.max_model_len - max(map(len, prompts))
        return BeamSearchParams(
            beam_width=sampling.n,
            max_tokens=sampling.max_tokens or room,
            ignore_eos=sampling.ignore_eos,
            length_penalty=asked.beam_length_penalty,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
        )

    def num_prompts(self, asked: Asked) -> int:
        """Prompts of a body."""
        return 1

    @abstractmethod
    async def prompts(self, handed: Handed[Asked]) -> list[list[int]]:
        """Return the prompts as checked token ids."""

    @abstractmethod
    async def plan(self, handed: Handed[Asked], prompts: list[list[int]]) -> PlanT:
        """Work out how the answer is made.

        Raises:
            InvalidRequest: the model cannot answer so.
        """

    async def generate(self, prepared: Prepared[Asked, PlanT]) -> Chunks:
        """Yield the answer's chunks.

        Raises:
            InvalidRequest: its form cannot be held, as only compiling shows.
        """
        chunks = self._service.generate(prepared.generation, prepared.arrival)
        try:
            async with aclosing(chunks):
                async for item in chunks:
                    yield item
        except InvalidRequest as error:
            raise self.blaming(prepared.asked, error) from None

    def blaming(self, asked: Asked, error: InvalidRequest) -> InvalidRequest:
        """Return an error as one of the field that the client has sent."""
        return at_path(error, FORM, asked.form_path)

    @abstractmethod
    def max_tokens_param(self, asked: Asked) -> str:
        """Return the field to blame where prompt and output do not fit."""


class GenerationRoute(PreparedRoute[Asked, PlanT]):
    """Answers one kind of body with choices."""

    chunk_object: str
    """`object` of a stream's events."""

    async def create(self, request: Request) -> Response:
        """Check, render and tokenize; the response generates.

        Raises:
            InvalidRequest, HttpRefusal: the client's mistake.
        """
        handed = await self._service.bodies.read(request, self.read)
        prepared = await self.prepare(handed, self._service.arrival(request))
        if is_prefill(prepared.generation):
            return prefill_response(self._service, prepared.generation, prepared.arrival)
        return await self.respond(prepared)

    async def respond(self, prepared: Prepared[Asked, PlanT]) -> Response:
        """Return the answer, which generates when it is sent."""
        service, generation, asked = self._service, prepared.generation, prepared.asked
        form = await self.form(prepared)
        has_form = generation.sampling.structured_outputs is not None
        chunks = self.generate(prepared) if has_form else service.generate(generation, prepared.arrival)
        if not asked.stream:
            return WholeResponse(self._whole(form, prepared.head, generation, chunks), service.open_requests)
        counts = TokenCounts(generation, form)
        writer = EventWriter(self.chunk_object, prepared.head, form, counts, asked.stream_options)
        return stream_answer(service, chunks, writer, prepared.stream)

    async def _whole(
        self, form: WholeFormat, answer: AnswerHead, generation: Generation, chunks: Chunks
    ) -> AsyncGenerator[bytes, None]:
        choices, counts = [Collected() for _ in range(generation.num_choices)], TokenCounts(generation, form)
        async with aclosing(chunks):
            async for index, chunk in chunks:
                choices[index].add(chunk)
                counts.add(index, chunk)
                form.read(index, chunk)
        head = {"id": answer.id, "created": answer.created, "model": answer.model, "usage": counts.usage()}
        yield msgspec.json.encode(form.whole(choices, head))

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> Asked:
        """Check a decoded body."""

    @abstractmethod
    async def form(self, prepared: Prepared[Asked, PlanT]) -> WholeFormat:
        """Return what writes the choices."""


class WholeFormat(ChoiceFormat, ABC):
    """Writes choices, of a stream or all at once."""

    @property
    def num_thought_tokens(self) -> int:
        """Of all choices so far."""
        return 0

    def read(self, index: int, chunk: Chunk) -> None:
        """Take note of a chunk of an answer that `whole` will write."""

    @abstractmethod
    def whole(self, choices: list[Collected], head: Mapping[str, Any]) -> msgspec.Struct:
        """Return the whole answer; `head` has the fields that both routes share."""
