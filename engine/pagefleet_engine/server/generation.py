"""Runs the choices of one HTTP request on the engine, merges their chunks, and measures them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pagefleet_protocol.kv_handoff import KvTransfer

from pagefleet_engine.engine_core.output_text import NOTHING_ELSEWHERE, Elsewhere, OutputSoFar, fan_out
from pagefleet_engine.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_engine.server.ports import Chunk, Engine

Chunks = AsyncGenerator[tuple[int, Chunk], None]
"""Choice index and chunk, as they come."""


@dataclass(frozen=True, slots=True)
class Job:
    """One choice: one request to the engine core."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    elsewhere: Elsewhere = NOTHING_ELSEWHERE


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt with its parameters; `sampling.n` choices are made of it."""

    token_ids: list[int]
    sampling: SamplingParams
    resumed: Sequence[OutputSoFar | None] = ()
    """Output that each of its choices goes on from; empty: none does."""


def jobs_of(
    request_id: str,
    prompts: Sequence[PreparedPrompt],
    priority: int = 0,
    cache_salt: str | None = None,
    transfer: KvTransfer | None = None,
) -> list[Job]:
    """Spread prompts times `n` into jobs; a job's place in the list is its choice's index."""
    parts: list[tuple[list[int], SamplingParams, OutputSoFar | None]] = []
    shared, outputs = None, []
    for prompt in prompts:
        if prompt.sampling is not shared:  # the prompts of one request share theirs: split once
            shared, outputs = prompt.sampling, fan_out(prompt.sampling)
        resumed = prompt.resumed or (None,) * len(outputs)
        parts += [(prompt.token_ids, sampling, known) for sampling, known in zip(outputs, resumed, strict=True)]
    return [
        Job(f"{request_id}-{i}", ids, sampling, priority, cache_salt, Elsewhere(known, transfer))
        for i, (ids, sampling, known) in enumerate(parts)
    ]


class Generator:
    """Runs jobs. `clock` is monotonic, in seconds."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    def now(self) -> float:
        """Return the time on the generator's clock."""
        return self._clock()

    def run(self, jobs: Sequence[Job], arrived: float) -> Chunks:
        """Yield (choice index, chunk) as they come; closing it aborts what still runs.

        Args:
            jobs: one per choice.
            arrived: `now()` when the request was there, before its prompt was built.

        Raises:
            EngineError: the first failure of any choice; the others are aborted.
        """
        return self._alone(jobs[0], arrived) if len(jobs) == 1 else self._merged(jobs, arrived)

    async def _alone(self, job: Job, arrived: float) -> Chunks:
        async with aclosing(self._measured(job, arrived)) as chunks:
            async for chunk in chunks:
                yield 0, chunk

    async def _merged(self, jobs: Sequence[Job], arrived: float) -> Chunks:
        # Unbounded, yet it holds no more than the answers themselves.
        queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue()

        async def pump(index: int, job: Job) -> None:
            try:
                async with aclosing(self._measured(job, arrived)) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait((index, chunk))
                queue.put_nowait(None)
            except Exception as error:  # carried to the request's own task, which raises it
                queue.put_nowait(error)

        pumps: list[asyncio.Task[None]] = []
        running = len(jobs)
        try:
            for index, job in enumerate(jobs):
                pumps.append(asyncio.create_task(pump(index, job)))
                # To start one checks and sends a whole prompt: other requests must not wait for all of a thousand.
                await asyncio.sleep(0)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _measured(self, job: Job, arrived: float) -> AsyncGenerator[Chunk, None]:
        chunks = self._engine.generate(
            job.prompt_token_ids,
            job.sampling,
            request_id=job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
            elsewhere=job.elsewhere,
        )
        clock, metrics = self._clock, self._metrics
        reason: str | None = "abort"
        last = None
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.token_ids:
                        now = clock()
                        if last is None:
                            metrics.time_to_first_token.observe(now - arrived)
                            metrics.prompt_tokens.inc(len(job.prompt_token_ids))
                            metrics.request_prompt_tokens.observe(len(job.prompt_token_ids))
                        else:
                            metrics.inter_token_latency.observe(now - last)
                        last = now
                        metrics.generation_tokens.inc(len(chunk.token_ids))
                    if chunk.finish_reason is not None:
                        reason = chunk.finish_reason
                        metrics.request_duration.observe(clock() - arrived)
                    yield chunk
            if reason == "abort":
                raise RequestFailed("its outputs ended without a finish reason")
        except (InvalidRequest, QueueFull):
            reason = None  # never accepted
            raise
        except (RequestFailed, EngineDead):
            reason = "error"
            raise
        finally:
            if reason is not None:
                metrics.finished(reason)
