"""How many engines each signal asks for: `load` follows from what arrives, `pressure` from what waits or is late.

Prefill (after TokenScale, arXiv:2512.03416, and llm-d's token-aware signal): tokens that arrive per second over the
rate that one engine was learned to compute them at; and tokens not computed yet over that rate and over what the target
leaves for waiting. Decode: KV cache in use; and requests that run over those that one engine may run within the target.
Nothing is divided by a rate that is not known: until it is, requests that wait ask for engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pagefleet_protocol.inference_status import PairRole

from pagefleet_operator.autoscale.decode_speed import DecodeSpeed
from pagefleet_operator.autoscale.policy import DEFAULT_QUEUE, ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.plan.pair_ratio import PREFILL_BUSY

WAIT_SHARE = 0.65
"""Of what the target leaves for waiting, since nineteen of twenty requests are to be within it, not the mean."""
LEAST_WAIT_SHARE = 0.2
"""Of the target: prompts that alone take nearly all of it leave no less."""
ITL_SHARE = 0.95
"""Of the target between tokens that the mean may reach."""
ATTAINMENT = 0.95
"""Share of requests that are to be within a target."""
ENOUGH = 20.0
"""Observations before a share of them says anything."""
MOST_AT_ONCE = 2.0
"""A missed target asks for at most so many times the engines that serve."""


_OF_PART: Mapping[PairRole, frozenset[str]] = {
    "prefill": frozenset({"prefill", "backlog", "queue", "ttft"}),
    "decode": frozenset({"kv", "decode", "crowd", "itl"}),
}
"""Names of the demands that are for engines of one part alone."""


@dataclass(frozen=True, slots=True)
class EnginesSeen:
    """The engines that exist, or are on their way."""

    ready: int = 0
    warming: int = 0
    """Made, and not ready yet."""
    failing: int = 0
    """Made, and not to be expected to become ready: they start again and again, or for too long."""
    refused: int = 0
    """Wanted, and not to be created: a quota is used up."""
    start_up_s: float | None = None
    """What those that became ready took to start; None: none was seen to."""
    endpoints: int = 1
    """That routers take for engines, of each."""

    @property
    def count(self) -> int:
        """Of all that exist."""
        return self.ready + self.warming + self.failing


@dataclass(frozen=True, slots=True)
class Learned:
    """How fast engines are."""

    rate: float | None = None
    """Uncached prompt tokens per second and engine, as routers learned it; None: nobody knows yet."""
    speed: DecodeSpeed = field(default_factory=DecodeSpeed)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one signal asks for."""

    name: str
    """prefill, kv, decode; backlog, crowd, queue; ttft, itl."""
    engines: float
    """Not rounded."""
    because: str
    """The numbers, for people."""


def load_demands(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, learned: Learned
) -> Iterator[Demand]:
    """Yield what the load asks for, whatever engines there are."""
    arriving, rate = signals.prompt_tokens_per_s, learned.rate
    if rate and arriving:
        yield Demand(
            "prefill", arriving / (rate * PREFILL_BUSY),
            f"{arriving:.0f} uncached prompt tokens/s arrive, an engine computes {rate:.0f}/s",
        )  # fmt: skip
    if signals.engines > 0 and signals.kv_usage > 0:
        yield Demand(
            "kv", signals.kv_usage * signals.engines / policy.kv_usage,
            f"KV cache of {signals.engines:.0f} engines {signals.kv_usage:.0%} full, target {policy.kv_usage:.0%}",
        )  # fmt: skip
    if policy.itl_s is not None:
        yield from _decode(policy, policy.itl_s, signals, engines, learned)


def _decode(
    policy: ScalingPolicy, itl_s: float, signals: FleetSignals, engines: EnginesSeen, learned: Learned
) -> Iterator[Demand]:
    made, aim = signals.generated_per_s, ITL_SHARE * itl_s
    line = learned.speed.line()
    # Tokens per second do not depend on how many engines make them, as requests at once do.
    needed = line.engines(made * aim, prefill_engines(policy, signals, learned.rate), aim) if line else None
    if line and needed is not None:
        yield Demand(
            "decode",
            needed,
            f"{made:.0f} tokens/s generated, a step takes {line.fixed * 1000:.1f} ms and "
            f"{line.per_request * 1000:.2f} ms a request, target {itl_s * 1000:.0f} ms",
        )
    elif (between := signals.seconds_between_tokens) is not None and engines.ready:
        # A step's time grows no faster than its requests, so fewer engines are no slower than this says.
        yield Demand(
            "decode",
            engines.ready * min(MOST_AT_ONCE, between / aim),
            f"{between * 1000:.0f} ms between tokens with {engines.ready} engines, target {itl_s * 1000:.0f} ms",
        )


def pressure_demands(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, learned: Learned
) -> Iterator[Demand]:
    """Yield what requests ask for that wait, or are too many at once.

    Engines that are warming up will take their part of them.
    """
    rate = learned.rate
    waiting = signals.held + signals.queued + signals.waiting
    backlog = signals.queued_tokens + signals.prefill_tokens
    if policy.ttft_s is not None and rate and backlog:
        allowed_s = wait_allowed_s(policy.ttft_s, signals.tokens_per_prompt, rate)
        needed = backlog / (rate * allowed_s)
        yield Demand(
            "backlog", _credited(needed, engines),
            f"{backlog:.0f} prompt tokens wait, an engine computes {rate:.0f}/s and may take {allowed_s:.2f} s",
        )  # fmt: skip
    line = learned.speed.line() if policy.itl_s is not None else None
    if policy.itl_s is not None and line and signals.running:
        crowded = line.engines(signals.running, prefill_engines(policy, signals, rate), ITL_SHARE * policy.itl_s)
        if crowded is not None:
            because = f"{signals.running:.0f} requests run, target {policy.itl_s * 1000:.0f} ms between tokens"
            yield Demand("crowd", _credited(crowded, engines), because)
    per_engine = policy.queue if policy.queue is not None else None if rate else DEFAULT_QUEUE
    if per_engine and waiting:
        yield Demand(
            "queue", _credited(waiting / per_engine, engines),
            f"{waiting:.0f} requests wait, target {per_engine:.0f} per engine",
        )  # fmt: skip


def missed_targets(policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen) -> Iterator[Demand]:
    """Yield what is asked for by requests that were too late: the correction where rates were learned wrongly."""
    for name, target_s, seen in (
        ("ttft", policy.ttft_s, signals.first_token),
        ("itl", policy.itl_s, signals.between_tokens),
    ):
        share = seen.share_within(target_s) if target_s is not None else None
        late = seen.quantile(ATTAINMENT)
        if target_s is None or share is None or late is None or seen.total < ENOUGH or share >= ATTAINMENT:
            continue
        if not engines.ready:
            continue
        factor = min(MOST_AT_ONCE, max(1.0, late / target_s))
        # Those that are warming up were counted on already.
        needed = max(engines.ready + 1.0, engines.ready * factor) if not engines.warming else float(engines.count)
        to = "to the first token" if name == "ttft" else "between tokens"
        yield Demand(name, needed, f"{share:.0%} of requests within {target_s * 1000:.0f} ms {to}")


def of_part(policy: ScalingPolicy, demands: Iterable[Demand]) -> list[Demand]:
    """Return the demands for these engines: all, or those that their part of a disaggregated service is for."""
    return [one for one in demands if policy.part is None or one.name in _OF_PART[policy.part]]


def prefill_engines(policy: ScalingPolicy, signals: FleetSignals, rate: float | None) -> float:
    """Return the engines that the arriving prompts keep busy; 0 where that is not known, or others compute them."""
    if policy.part == "decode":
        return 0.0
    return (signals.prompt_tokens_per_s or 0.0) / rate if rate else 0.0


def wait_allowed_s(ttft_s: float, tokens_per_prompt: float, rate: float) -> float:
    """Return the seconds of waiting that a target leaves to a prompt that has to be computed as well."""
    return max(LEAST_WAIT_SHARE * ttft_s, WAIT_SHARE * (ttft_s - tokens_per_prompt / rate))


def _credited(needed: float, engines: EnginesSeen) -> float:
    """Return what is needed beyond the engines that warm up: these will take their part of what waits."""
    if needed <= engines.count:
        return needed
    return max(needed - engines.warming, float(engines.count))
