"""Arrival processes by their moments."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from pagefleet_engine.bench.offered_load import arrival_times


def gaps(rate: float, burstiness: float, seed: int = 0) -> list[float]:
    times = list(arrival_times(20_001, rate, burstiness, seed))
    assert times[0] == 0.0
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("rate", [0.5, 40.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(rate: float, burstiness: float) -> None:
    found = gaps(rate, burstiness)
    assert min(found) >= 0.0
    assert statistics.fmean(found) == pytest.approx(1.0 / rate, rel=0.05)
    variation = statistics.pstdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.08)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert set(arrival_times(5, math.inf, 1.0, 0)) == {0.0}


def test_the_same_seed_gives_the_same_times() -> None:
    assert gaps(3.0, 1.0, 7) == gaps(3.0, 1.0, 7) != gaps(3.0, 1.0, 8)
