"""What is measured of a simulated run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fleet_sim.jobs import Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests after the warm-up. Seconds; a request without a token counts as one that waits to the end."""

    num_requests: int
    hit_rate: float
    """Prompt tokens that came from a cache."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    output_rate: float
    """Tokens a second of finished requests."""
    imbalance: float
    """The busiest engine's requests over the mean."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def outcome_of(jobs: Sequence[Job], warm_up: float, end: float, num_engines: int) -> Outcome:
    """Measure what was sent from `warm_up` on, until `end`.

    Raises:
        ValueError: there is nothing.
    """
    measured = [job for job in jobs if job.sent_at >= warm_up]
    if not measured:
        raise ValueError("no request came after the warm-up: simulate for longer")
    waits = [(end if job.first_token_at is None else job.first_token_at) - job.sent_at for job in measured]
    begun = [job for job in measured if job.first_token_at is not None]
    counts = Counter(job.engine for job in measured)
    tokens = sum(job.num_output for job in jobs if job.ended_at is not None and warm_up <= job.ended_at <= end)
    return Outcome(
        len(measured),
        sum(job.num_hit for job in begun) / max(1, sum(job.num_tokens for job in begun)),
        percentile(waits, 0.5),
        percentile(waits, 0.9),
        percentile(waits, 0.99),
        tokens / max(end - warm_up, math.ulp(1.0)),
        max(counts.values()) * num_engines / len(measured),
    )
