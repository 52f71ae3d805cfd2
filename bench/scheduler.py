"""Host time of one scheduler step without a model: schedule() and update() with many running requests."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepPlan, StepResult
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_protocol.block_hash import PrefixScope

from bench.report import write_report

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
DECODE_PROMPT_TOKENS = 512
LONG_PROMPT_TOKENS = 4_096
MAX_MODEL_LEN = 8_192
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per step."""

    schedule_p50_ms: float
    update_p50_ms: float
    step_p50_ms: float
    step_p99_ms: float


class Load:
    """A scheduler whose seats are all taken: by endless decodes, and by long prompts that are replaced as they end."""

    def __init__(self, num_decoding: int, num_prefilling: int, budget: int) -> None:
        num_seats = num_decoding + num_prefilling
        config = SchedulerConfig(max_num_seqs=num_seats, max_num_batched_tokens=budget)
        kv_cache = KVCache(num_seats * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
        self.scheduler = Scheduler(config, kv_cache, ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE))
        self._rng = random.Random(0)
        self._num_added = 0
        for _ in range(num_decoding):
            self._add(DECODE_PROMPT_TOKENS, ENDLESS)
        while self.step().num_tokens > num_decoding:
            pass
        for _ in range(num_prefilling):
            self._add(LONG_PROMPT_TOKENS, ONE_TOKEN)

    def step(self, seconds: list[tuple[float, float]] | None = None) -> StepPlan:
        """Run one step and append the seconds of schedule() and of update()."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        result = StepResult([[self._rng.randrange(VOCAB_SIZE)] if row.samples else [] for row in plan.rows])
        answered = time.perf_counter()
        updates = self.scheduler.update(plan, result)
        if seconds is not None:
            seconds.append((scheduled - start, time.perf_counter() - answered))
        for update in updates:
            if update.finish_reason is not None:
                self._add(LONG_PROMPT_TOKENS, ONE_TOKEN)
        return plan

    def _add(self, num_tokens: int, sampling: SamplingParams) -> None:
        self._num_added += 1
        prompt = self._rng.choices(range(VOCAB_SIZE), k=num_tokens)
        self.scheduler.add(Request(f"request-{self._num_added}", prompt, sampling, (2,), PrefixScope("bench")))


def measure(num_running: int, prefill_share: float, budget: int, num_steps: int) -> Timing:
    """Time `num_steps` steps with `num_running` requests, of which `prefill_share` are in the middle of a prompt."""
    num_prefilling = round(num_running * prefill_share)
    load = Load(num_running - num_prefilling, num_prefilling, budget)
    for _ in range(20):
        load.step()
    seconds: list[tuple[float, float]] = []
    for _ in range(num_steps):
        load.step(seconds)
    load.scheduler.check_integrity()
    totals = [schedule + update for schedule, update in seconds]
    return Timing(
        schedule_p50_ms=_milliseconds(statistics.median(schedule for schedule, _ in seconds)),
        update_p50_ms=_milliseconds(statistics.median(update for _, update in seconds)),
        step_p50_ms=_milliseconds(statistics.median(totals)),
        step_p99_ms=_milliseconds(statistics.quantiles(totals, n=100)[98]),
    )


def main() -> None:
    """Print a table; with --json, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="requests that run at once (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2_000, help="steps per case (default: %(default)s)")
    budget = SchedulerConfig().max_num_batched_tokens
    parser.add_argument(
        "--budget", type=int, default=budget, help="tokens per step (default: %(default)s, the engine's)"
    )
    parser.add_argument("--json", metavar="PATH", help="write the figures with machine, commit and command")
    options = parser.parse_args()
    cases = {"decode": 0.0, "decode_with_10%_prefill": 0.1}
    print(f"{options.running} running requests, {options.budget} tokens a step at most, {options.steps} steps")
    print("milliseconds of host time per step")
    print(f"{'load':<26}{'schedule p50':>14}{'update p50':>12}{'step p50':>10}{'step p99':>10}")
    figures = {}
    for name, prefill_share in cases.items():
        timing = measure(options.running, prefill_share, options.budget, options.steps)
        figures[name] = asdict(timing)
        print(f"{name:<26}{timing.schedule_p50_ms:>14}{timing.update_p50_ms:>12}", end="")
        print(f"{timing.step_p50_ms:>10}{timing.step_p99_ms:>10}")
    if options.json:
        setting = {"running": options.running, "tokens_per_step": options.budget, "steps": options.steps}
        write_report(options.json, "scheduler", {**setting, **figures})


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


if __name__ == "__main__":
    main()
