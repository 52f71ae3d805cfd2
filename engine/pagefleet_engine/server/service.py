"""What the generating routes share: one served model, the parts that serve it, and how it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pagefleet_protocol.openai_common import RequestRules
from pagefleet_protocol.openai_json import shown
from starlette.requests import Request

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.core.outputs import Waits
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.parsers.family import AnswerFamily
from pagefleet_engine.server.body import BodyReader
from pagefleet_engine.server.console import RequestNote, note_of
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.ports import Engine, ServedModel, Tokenizer
from pagefleet_engine.server.prompts import Prompts
from pagefleet_engine.server.tracing import Arrival, span_of, traced


class Generator:
    """Runs requests. `clock` is monotonic, in seconds."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    def now(self) -> float:
        """Return the time on the generator's clock."""
        return self._clock()

    async def run(self, asked: Generation, arrived: float, note: RequestNote | None = None) -> Chunks:
        """Yield (choice index, chunk) as they come; closing it aborts what still runs.

        Args:
            asked: what to run.
            arrived: `now()` when the request was there, before its prompt was built.
            note: of the request, where somebody will look at it.

        Raises:
            EngineError, InvalidRequest: the first failure of any choice; the others are aborted.
        """
        metrics = self._metrics
        num_open, reason = asked.num_choices, "abort"
        choices: dict[int, _Choice] = {}
        """Those that have a token."""
        note = note or RequestNote()
        note.is_generation, note.prompt_tokens = True, asked.num_prompt_tokens
        try:
            async with aclosing(self._engine.generate(asked)) as chunks:
                async for index, chunk in chunks:
                    if chunk.token_ids:
                        self._count(asked, index, chunk, choices, arrived)
                        note.count(len(chunk.token_ids), self._clock() - arrived)
                    if chunk.finish_reason is not None:
                        num_open -= 1
                        self._ended(chunk.finish_reason, choices.get(index), arrived)
                    yield index, chunk
            if num_open:
                raise RequestFailed("its outputs ended without a finish reason")
        except (InvalidRequest, QueueFull):
            num_open = 0  # never accepted
            raise
        except (RequestFailed, EngineDead):
            reason = "error"
            raise
        finally:
            for _ in range(num_open):
                metrics.finished(reason)

    def _count(self, asked: Generation, index: int, chunk: Chunk, choices: dict[int, _Choice], arrived: float) -> None:
        metrics, now = self._metrics, self._clock()
        metrics.generation_tokens.inc(len(chunk.token_ids))
        choice = choices.get(index)
        if choice is not None:
            metrics.inter_token_latency.observe(now - choice.last_at)
            choice.last_at = now
            choice.num_tokens += len(chunk.token_ids)
            return
        if not choices:
            metrics.requests.begins(asked.sampling.n, asked.sampling.max_tokens)
        choices[index] = _Choice(now, now, len(chunk.token_ids), chunk.waits)
        num_prompt_tokens = len(asked.prompts[index // asked.sampling.n])
        metrics.time_to_first_token.observe(now - arrived)
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.request_prompt_tokens.observe(num_prompt_tokens)
        metrics.requests.first_token(num_prompt_tokens, chunk.num_cached_tokens or 0, chunk.waits, now)

    def _ended(self, reason: str, choice: _Choice | None, arrived: float) -> None:
        self._metrics.finished(reason)
        self._metrics.request_duration.observe(self._clock() - arrived)
        if choice is not None:
            self._metrics.requests.ended(choice.num_tokens, choice.first_at, choice.last_at, choice.waits)


@dataclass(slots=True)
class _Choice:
    """A choice that has a token."""

    first_at: float
    last_at: float
    num_tokens: int
    waits: Waits | None


@dataclass(frozen=True, slots=True)
class Service:
    """Made once by `create_app`, given to every route."""

    model: ServedModel
    tokenizer: Tokenizer
    prompts: Prompts
    generator: Generator
    bodies: BodyReader
    open_requests: OpenRequests
    metrics: EngineMetrics
    family: AnswerFamily
    """How the model writes thoughts and calls."""
    template_names: frozenset[str]
    """What the chat template reads."""
    rules: RequestRules

    def arrival(self, request: Request) -> Arrival:
        """Return that a request is there, now."""
        return Arrival(self.generator.now(), span_of(request.scope), note_of(request.scope))

    def generate(self, asked: Generation, arrival: Arrival) -> Chunks:
        """Run the choices of a request, see `Generator.run`."""
        chunks = self.generator.run(asked, arrival.at, arrival.note)
        return traced(chunks, asked, arrival, self.generator.now) if arrival.span.is_kept else chunks

    def check_model(self, name: str) -> None:
        """Refuse any name but the served model's.

        Raises:
            HttpRefusal: 404, with the name cut and escaped.
        """
        if name not in self.model.names:
            message = f"The model {shown(name)} does not exist; this server has '{self.model.name}'."
            raise HttpRefusal(404, message, param="model", code="model_not_found")

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count body fields that nobody knows."""
        if fields:
            self.metrics.ignored_fields.inc(len(fields))
