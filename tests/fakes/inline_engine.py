"""An engine for the server that steps its core in the event loop: every token is one chunk, whoever reads.

`ScriptExecutor` puts out what a test has written, whatever the prompt. No test in here.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from pagefleet_engine.client.health import EngineHealth
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.engine_core.admission import check_message
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats
from pagefleet_engine.engine_core.output_text import NOTHING_ELSEWHERE, Chunk, Elsewhere, OutputText
from pagefleet_engine.executor.executor import CacheFacts
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

BLOCK_SIZE = 4
NUM_BLOCKS = 128
CONTEXT = 256


@dataclass(slots=True)
class _Row:
    num_tokens: int
    num_prompt_tokens: int
    wants_logprobs: bool


@dataclass(frozen=True, slots=True)
class _Done:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ScriptExecutor:
    """The token at output position i is `script[i]`, over and over; its log-probability tells the position."""

    def __init__(self, script: Sequence[int]) -> None:
        self.cache = CacheFacts(NUM_BLOCKS, BLOCK_SIZE, 1, group_layers([None]))
        self.max_in_flight = 1
        self.idle_seconds = 0.0
        self._script = script
        self._rows: dict[str, _Row] = {}

    def launch(self, plan: StepPlan) -> _Done:
        for request_id in plan.removed:
            del self._rows[request_id]
        for new in plan.new:
            wants_logprobs = new.sampling.logprobs is not None
            self._rows[new.request_id] = _Row(len(new.token_ids), new.num_prompt_tokens, wants_logprobs)
        sampled: list[Sequence[int]] = []
        logprobs = {}
        for scheduled in plan.rows:
            row = self._rows[scheduled.request_id]
            if not scheduled.samples:
                sampled.append(())
                continue
            position = row.num_tokens - row.num_prompt_tokens
            row.num_tokens += 1
            token = self._script[position % len(self._script)]
            sampled.append((token,))
            if row.wants_logprobs:
                logprobs[scheduled.request_id] = (TokenLogprobs((token, 1), (-position / 8, -9.0), 1),)
        return _Done(StepResult(sampled, logprobs))

    def shutdown(self) -> None:
        """Nothing is held."""


def script_core(script: Sequence[int], vocab_size: int) -> EngineCore:
    """Return a core that puts out `script`."""
    limits = ModelLimits(CONTEXT, vocab_size)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), KVCache(NUM_BLOCKS, BLOCK_SIZE), limits)
    return EngineCore(scheduler, ScriptExecutor(script), limits, "inline")


class InlineEngine:
    """Runs one request after the other."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self._tokenizer = tokenizer
        self._serial = itertools.count()

    @property
    def stats(self) -> CoreStats:
        return self.core.stats()

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, stalled_s=0.0)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> AsyncGenerator[Chunk, None]:
        resumed = elsewhere.output
        resumed_ids = [] if resumed is None else resumed.token_ids
        own_id, eos = f"{request_id}#{next(self._serial)}", self._tokenizer.eos_token_ids
        message = AddRequest(
            own_id, list(prompt_token_ids), sampling, eos, resumed_token_ids=resumed_ids, transfer=elsewhere.transfer
        )
        ended = check_message(message, self.core.limits)
        text = OutputText(self._tokenizer, sampling)
        if resumed is not None:
            rest = text.resume(resumed, ended)
            if rest is not None:
                yield rest
                if rest.finish_reason is not None:
                    return
        refused = self.core.add(message)
        assert refused is None, refused
        try:
            while self.core.has_work:
                for output in self.core.step():
                    chunk = text.push(output)
                    if chunk is not None:
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
        finally:
            self.core.abort([own_id])
            self.core.step()
            self.core.check_integrity()
