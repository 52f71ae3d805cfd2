"""Host time of one step without a model: schedule(), update() and the message that tells it, with many requests."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepPlan, StepResult
from pagefleet_engine.engine_core.messages import CoreStats, StepOutputs
from pagefleet_engine.engine_core.wire import to_wire
from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.events.publisher import KvEventPublisher
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

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
    message_p50_ms: float
    """From the updates to the bytes for the API process, and the publisher's bell."""
    step_p50_ms: float
    step_p99_ms: float


class Load:
    """A scheduler whose seats are all taken: by endless decodes, and by long prompts that are replaced as they end."""

    def __init__(
        self, num_decoding: int, num_prefilling: int, budget: int, in_flight: int, publisher: KvEventPublisher | None
    ) -> None:
        num_seats = num_decoding + num_prefilling
        config = SchedulerConfig(max_num_seqs=num_seats, max_num_batched_tokens=budget)
        cache_events = None if publisher is None else publisher.cache_events
        kv_cache = KVCache(num_seats * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, events=cache_events)
        self.scheduler = Scheduler(config, kv_cache, ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE))
        self._max_in_flight = in_flight
        self._publisher = publisher
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._rng = random.Random(0)
        self._num_added = 0
        for _ in range(num_decoding):
            self._add(DECODE_PROMPT_TOKENS, ENDLESS)
        while self.step().num_tokens > num_decoding:
            pass
        for _ in range(num_prefilling):
            self._add(LONG_PROMPT_TOKENS, ONE_TOKEN)

    def step(self, seconds: list[tuple[float, float, float]] | None = None) -> StepPlan:
        """Launch one step, take in the oldest, and append the seconds of schedule(), of update() and of the message."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self._in_flight.append(
            (plan, StepResult([(self._rng.randrange(VOCAB_SIZE),) if row.samples else () for row in plan.rows]))
        )
        if len(self._in_flight) < self._max_in_flight:
            return plan
        oldest = self._in_flight.popleft()
        answered = time.perf_counter()
        updates = self.scheduler.update(*oldest)
        updated = time.perf_counter()
        if self._publisher is not None:
            self._publisher.flush()
        msgspec.msgpack.encode(StepOutputs([to_wire(update) for update in updates], CoreStats(0, 0, 0.0, 0, 0, 0, 0)))
        if seconds is not None:
            seconds.append((scheduled - start, updated - answered, time.perf_counter() - updated))
        for update in updates:
            if update.finish_reason is not None:
                self._add(LONG_PROMPT_TOKENS, ONE_TOKEN)
        return plan

    def _add(self, num_tokens: int, sampling: SamplingParams) -> None:
        self._num_added += 1
        prompt = self._rng.choices(range(VOCAB_SIZE), k=num_tokens)
        self.scheduler.add(Request(f"request-{self._num_added}", prompt, sampling, (2,), PrefixScope("bench")))


def measure(options: argparse.Namespace, prefill_share: float) -> Timing:
    """Time steps with `options.running` requests, of which `prefill_share` are in the middle of a prompt."""
    with contextlib.ExitStack() as stack:
        publisher = None
        if options.kv_events_port:
            place = KvEventsConfig("127.0.0.1", options.kv_events_port, None)
            publisher = stack.enter_context(KvEventPublisher(place, "bench"))
        return _measure(options, prefill_share, publisher)


def _measure(options: argparse.Namespace, prefill_share: float, publisher: KvEventPublisher | None) -> Timing:
    num_prefilling = round(options.running * prefill_share)
    load = Load(options.running - num_prefilling, num_prefilling, options.budget, options.in_flight, publisher)
    for _ in range(20):
        load.step()
    seconds: list[tuple[float, float, float]] = []
    for _ in range(options.steps):
        load.step(seconds)
    load.scheduler.check_integrity()
    totals = [sum(parts) for parts in seconds]
    schedules, updates, messages = zip(*seconds, strict=True)
    return Timing(
        schedule_p50_ms=_milliseconds(statistics.median(schedules)),
        update_p50_ms=_milliseconds(statistics.median(updates)),
        message_p50_ms=_milliseconds(statistics.median(messages)),
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
    parser.add_argument("--in-flight", type=int, default=2, help="steps that overlap (default: %(default)s)")
    text = "publish the prefix cache's events on this port of loopback (default: not at all)"
    parser.add_argument("--kv-events-port", type=int, default=0, help=text)
    parser.add_argument("--json", metavar="PATH", help="write the figures with machine, commit and command")
    options = parser.parse_args()
    cases = {"decode": 0.0, "decode_with_10%_prefill": 0.1}
    setting = {"running": options.running, "tokens_per_step": options.budget, "in_flight": options.in_flight}
    if options.kv_events_port:
        setting["kv_events_port"] = options.kv_events_port
    print(", ".join(f"{name}: {value}" for name, value in setting.items()), f"({options.steps} steps)")
    print("milliseconds of host time per step")
    print(f"{'load':<26}{'schedule p50':>14}{'update p50':>12}{'message p50':>13}{'step p50':>10}{'step p99':>10}")
    figures = {}
    for name, prefill_share in cases.items():
        timing = measure(options, prefill_share)
        figures[name] = asdict(timing)
        print(f"{name:<26}{timing.schedule_p50_ms:>14}{timing.update_p50_ms:>12}", end="")
        print(f"{timing.message_p50_ms:>13}", end="")
        print(f"{timing.step_p50_ms:>10}{timing.step_p99_ms:>10}")
    if options.json:
        write_report(options.json, "scheduler", {**setting, "steps": options.steps, **figures})


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


if __name__ == "__main__":
    main()
