"""An engine for the server that steps its core in the event loop: every token is one chunk, whoever reads.

`ScriptExecutor` puts out what a test has written, whatever the prompt. No test in here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepMasks, StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.engine_core.admission import check_resumed
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats
from pagefleet_engine.engine_core.output_text import OutputText
from pagefleet_engine.engine_core.progress import EngineHealth
from pagefleet_engine.executor.executor import CacheFacts
from pagefleet_engine.executor.trace import StepTrace
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
    is_computed: bool = True

    def sample(self, masks: StepMasks) -> None:
        raise AssertionError("the script says every token")

    def result(self) -> StepResult:
        return self.outcome


class ScriptExecutor:
    """The token at output position i is `script[i]`, over and over; its log-probability tells the position."""

    def __init__(self, script: Sequence[int]) -> None:
        self.cache = CacheFacts(NUM_BLOCKS, BLOCK_SIZE, 1, group_layers([None]))
        self.max_in_flight = 1
        self.num_stages = 1
        self.idle_seconds = 0.0
        self.expert_load = None
        self.trace: StepTrace | None = None
        self.bells: Sequence[int] = ()
        self._script = script
        self._rows: dict[str, _Row] = {}

    def check(self) -> None:
        """See Executor."""

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
    """Runs one request after the other; its choices together."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self._tokenizer = tokenizer
        self._serial = itertools.count()

    @property
    def stats(self) -> CoreStats:
        return self.core.stats()

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, stalled_s=0.0)

    def _add(self, message: AddRequest, texts: Mapping[str, tuple[int, OutputText]]) -> None:
        for refused in self.core.add(message):
            texts[refused.request_id][1].push(refused)  # raises

    async def generate(self, asked: Generation) -> Chunks:
        texts: dict[str, tuple[int, OutputText]] = {}
        ids = (f"{asked.request_id}#{serial}" for serial in self._serial)
        for message, first, so_far in asked.messages(ids, self._tokenizer.eos_token_ids):
            for index, output_id in enumerate(message.output_ids, first):
                texts[output_id] = index, OutputText(self._tokenizer, message.sampling)
            if so_far is not None:
                rest = texts[message.request_id][1].resume(so_far, check_resumed(message, self.core.limits))
                if rest is not None:
                    yield first, rest
                    if rest.finish_reason is not None:
                        del texts[message.request_id]
                        continue
            self._add(message, texts)
        open_ids = set(texts)
        try:
            while open_ids and self.core.has_work:
                for output in self.core.step():
                    index, text = texts[output.request_id]
                    chunk = text.push(output) if output.request_id in open_ids else None
                    if chunk is not None:
                        yield index, chunk
                        if chunk.finish_reason is not None:
                            open_ids.discard(output.request_id)
        finally:
            self.core.abort(list(texts))
            self.core.step()
            self.core.check_integrity()
