"""The search alone, on made-up surfaces of goodput."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.bench.settings_search import Ended, Point, SettingsSearch, grid_start

Goodput = Callable[[Point], float]


def surface(draw: random.Random) -> tuple[list[int], Goodput]:
    """One or two settings of 3 to 7 candidates: one hill, perhaps askew, perhaps flat on top, perhaps with a corner
    where the server does not start."""
    sizes = [draw.randint(3, 7) for _ in range(draw.randint(1, 2))]
    top = [draw.random() for _ in sizes]
    steepness = [draw.uniform(0.1, 2.5) for _ in sizes]
    askew = draw.uniform(-0.6, 0.6)
    flat = draw.choice((0.0, 0.0, 0.02, 0.1))
    corner = draw.random() < 0.25

    def goodput(point: Point) -> float:
        if corner and all(place == size - 1 for place, size in zip(point, sizes, strict=True)):
            return 0.0
        away = [
            math.sqrt(steep) * (place / (size - 1) - at)
            for place, size, at, steep in zip(point, sizes, top, steepness, strict=True)
        ]
        fall = sum(one * one for one in away) + 2 * askew * (math.prod(away) if len(away) == 2 else 0.0)
        return 40.0 * math.exp(-max(fall - flat, 0.0))

    return sizes, goodput


def tuned(search: SettingsSearch, goodput: Goodput, noise: random.Random, deviation: float) -> tuple[list[Point], str]:
    tried = []
    while not isinstance(point := search.next(), Ended):
        tried.append(point)
        search.tell(point, goodput(point) * math.exp(noise.gauss(0.0, deviation)))
    return tried, point.why


def share_of_optimum(seed: int, deviation: float) -> float:
    sizes, goodput = surface(random.Random(seed))
    search = SettingsSearch(sizes, tuple(size // 2 for size in sizes))
    tried, _ = tuned(search, goodput, random.Random(seed + 1), deviation)
    assert len(tried) == len(set(tried)) <= 12
    best = search.best()
    assert best is not None
    return goodput(best) / max(goodput(point) for point in itertools.product(*map(range, sizes)))


def test_it_comes_within_three_percent_although_trials_are_noisy() -> None:
    shares = sorted(share_of_optimum(seed, 0.02) for seed in range(60))
    assert shares[2] >= 0.97
    assert shares[0] >= 0.9


def test_without_noise_it_errs_as_rarely() -> None:
    shares = sorted(share_of_optimum(seed, 0.0) for seed in range(100, 140))
    assert shares[1] >= 0.97


def test_one_lucky_trial_does_not_win() -> None:
    """Neighbours on a slope speak against it."""
    search = SettingsSearch([7], (0,), max_trials=7)
    true = [0.4, 0.6, 0.8, 0.95, 1.0, 0.98, 0.9]
    for place, goodput in enumerate(true):
        search.tell((place,), goodput * (1.06 if place == 3 else 1.0))
    assert search.best() == (4,)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 999))
def test_it_ends_in_time_and_tells_why(sizes: list[int], max_trials: int, seed: int) -> None:
    draw = random.Random(seed)
    some = {point: draw.choice((0.0, draw.random())) for point in itertools.product(*map(range, sizes))}
    search = SettingsSearch(sizes, (0,) * len(sizes), max_trials)
    tried, why = tuned(search, some.__getitem__, draw, 0.02)
    assert len(set(tried)) == len(tried) <= min(max_trials, len(some))
    if why == "every combination was tried":
        assert set(tried) == set(some)
    elif "trials were made" in why:
        assert len(tried) == max_trials
    else:
        assert "promises" in why
    best = search.best()
    assert some[best] > 0 if best is not None else not any(some[point] for point in tried)


@pytest.mark.parametrize(("default", "start"), [(64, (1,)), (100, (2,)), (None, (2,))])
def test_it_starts_at_the_default_or_in_the_middle(default: int | None, start: Point) -> None:
    assert grid_start({"seats": [32, 64, 128, 256, 512]}, {"seats": default}) == start
