"""A simulated engine: continuous batching, chunked prefill, paged KV with a prefix cache. One call is one step.

A step takes STEP + prompt tokens / prefill rate + what each decoding request and each token of its KV takes. Blocks of
finished requests stay cached, least recently used first out. A request is let in when its prompt has room; where
answers outgrow the KV, the last that came is put back and computed again (preemption by recompute, as vLLM does).

Not modelled: time of the API server, tokenization, graph sizes, collectives, KV offload.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.fleet_sim.jobs import BLOCK, Job


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Figures near those of a 32B model on two H100s: 15,928 tokens/s is llm-d's default for prefill."""

    prefill_rate: float = 16_000.0
    context_tokens: float = 65_536.0
    """Context at which a prompt token takes twice as long, for its attention."""
    step: float = 0.018
    """Seconds: reading the weights."""
    per_request: float = 0.00005
    per_kv_token: float = 0.055e-6
    """256 kB of KV a token at 4.7 TB/s."""
    num_blocks: int = 4_700
    """300,000 tokens: 73 % of them in 8 engines hold all prompts of the shared-prefix trace."""
    max_num_seqs: int = 256
    max_batched_tokens: int = 8_192


@dataclass(slots=True)
class Watch:
    """Who is told what happens."""

    first_token: Callable[[Job, float], None]
    finished: Callable[[Job, float], None]
    stored: Callable[[int, Sequence[int], float], None]
    removed: Callable[[int, Sequence[int], float], None]


class SimEngine:
    """One engine. `begin_step` returns how long the step takes, `end_step` does what it did."""

    def __init__(self, number: int, model: EngineModel, watch: Watch) -> None:
        self.number = number
        self.model = model
        self.is_stepping = False
        self.num_generated = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self._watch = watch
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []
        """By the step at which each ends."""
        self._chunks: list[tuple[Job, int]] = []
        self._num_steps = 0
        self._references: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._num_reserved = 0
        """Blocks given to prompts that are not computed yet."""
        self._answer_tokens = 0
        self._context_tokens = 0
        """KV tokens of all that decode."""

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold."""
        return self._num_held() / self.model.num_blocks

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def submit(self, job: Job) -> None:
        """Take a request."""
        self._waiting.append(job)

    def begin_step(self, now: float) -> float:
        """Plan a step; returns its seconds."""
        model = self.model
        budget = max(model.max_batched_tokens - len(self._decoding), BLOCK) // BLOCK
        seconds = model.step + model.per_request * len(self._decoding) + model.per_kv_token * self._context_tokens
        started = iter(tuple(self._prefilling))
        while budget > 0 and (job := next(started, None) or self._admit(now)) is not None:
            left = len(job.blocks) + -(-job.num_lost // BLOCK) - job.num_computed
            count = min(left, budget)
            budget -= count
            context = (job.num_computed + count / 2) * BLOCK
            seconds += count * BLOCK / model.prefill_rate * (1.0 + context / model.context_tokens)
            self._chunks.append((job, count))
        return seconds

    def end_step(self, now: float) -> None:
        """Do what the step did."""
        if self._decoding:
            self._num_steps += 1
            count = len(self._decoding)
            self.num_generated += count
            self._answer_tokens += count
            self._context_tokens += count
            while self._decoding and self._decoding[0][0] <= self._num_steps:
                self._finish(heapq.heappop(self._decoding)[2], now)
        for job, count in self._chunks:
            self._computed(job, count, now)
        self._chunks.clear()
        while self._num_held() > self.model.num_blocks and len(self._decoding) > 1:
            self._preempt(now)

    def _admit(self, now: float) -> Job | None:
        """Let in who waits first, if there is room: what is cached counts as of the step in which it is begun."""
        waiting, model = self._waiting, self.model
        if not waiting or self.num_running >= model.max_num_seqs:
            return None
        job = waiting[0]
        hit = self._match(job)
        wanted = len(job.blocks) - hit + -(-job.num_lost // BLOCK)
        unused = sum(key in self._unused for key in job.blocks[:hit])
        if self._num_held() + wanted + unused + 1 > model.num_blocks and self.num_running:
            return None
        waiting.popleft()
        for key in job.blocks[:hit]:
            self._references[key] += 1
            self._unused.pop(key, None)
        self._num_reserved += wanted
        job.num_computed = hit
        if job.first_token_at is None:
            job.num_hit = hit * BLOCK
        self._prefilling.append(job)
        self._evict(now)
        return job

    def _match(self, job: Job) -> int:
        """Return how many leading blocks are cached; the last is always computed."""
        for number, key in enumerate(job.blocks):
            if key not in self._references:
                return number
        return len(job.blocks) - 1

    def _num_held(self) -> int:
        held = len(self._references) - len(self._unused) + self._num_reserved
        return held + self._answer_tokens // BLOCK + len(self._decoding)

    def _evict(self, now: float) -> None:
        surplus = self._num_held() + len(self._unused) - self.model.num_blocks
        gone = []
        while surplus > 0 and self._unused:
            key = self._unused.popitem(last=False)[0]
            del self._references[key]
            gone.append(key)
            surplus -= 1
        if gone:
            self._watch.removed(self.number, gone, now)

    def _computed(self, job: Job, count: int, now: float) -> None:
        fresh = []
        for key in job.blocks[job.num_computed : job.num_computed + count]:
            if key in self._references:
                self._references[key] += 1  # another computed it at the same time: counted once
                self._unused.pop(key, None)
            else:
                self._references[key] = 1
                fresh.append(key)
            self._num_reserved -= 1
        job.num_computed += count
        self.num_computed_tokens += count * BLOCK
        if fresh:
            self._watch.stored(self.number, fresh, now)
        answered = -(-job.num_lost // BLOCK)
        if job.num_computed < len(job.blocks) + answered:
            return
        self._num_reserved -= answered
        self._prefilling.remove(job)
        if job.first_token_at is None:
            job.first_token_at = now
            self._watch.first_token(job, now)
        self.num_generated += 1
        self._answer_tokens += job.num_lost + 1
        self._context_tokens += job.num_tokens + job.num_lost + 1
        job.finish_step = self._num_steps + job.num_output - job.num_lost - 1
        if job.finish_step <= self._num_steps:
            self._finish(job, now)
        else:
            heapq.heappush(self._decoding, (job.finish_step, job.number, job))

    def _release(self, job: Job, num_answered: int) -> None:
        self._answer_tokens -= num_answered
        self._context_tokens -= job.num_tokens + num_answered
        for key in reversed(job.blocks):
            self._references[key] -= 1
            if not self._references[key]:
                self._unused[key] = None

    def _finish(self, job: Job, now: float) -> None:
        self._release(job, job.num_output)
        fresh = [key for key in job.answer if key not in self._references]
        for key in reversed(fresh):
            self._references[key] = 0
            self._unused[key] = None
        if fresh:
            self._watch.stored(self.number, fresh, now)
        self._evict(now)
        job.ended_at = now
        self._watch.finished(job, now)

    def _preempt(self, now: float) -> None:
        """Put the last that came back into the queue, with what it has generated."""
        entry = max(self._decoding, key=lambda one: one[1])
        self._decoding.remove(entry)
        heapq.heapify(self._decoding)
        job = entry[2]
        generated = job.num_output - (job.finish_step - self._num_steps)
        self._release(job, generated)
        job.num_lost = generated
        self.num_preemptions += 1
        self._waiting.appendleft(job)
        self._evict(now)
