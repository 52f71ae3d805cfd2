"""Which settings to measure next, and which of those measured is best: few trials, each of them noisy.

A Gaussian process over the places of the candidates on their axes (Rasmussen and Williams, 2006, algorithm 2.1)
explains the logarithm of goodput; the next trial is the one with the most expected improvement (Jones et al., 1998).
Noise does not lead it astray: the process knows how much of it there is and judges a trial together with its
neighbours, so the best is the highest point of the smoothed surface, not the luckiest trial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Point = tuple[int, ...]
"""Of each setting, the place of its value among the candidates."""
_Floats = NDArray[np.float64]

_NOISE = 0.02
"""Standard deviation of a trial's goodput, as a share of it."""
_SCALES, _LIKELY_SCALE = (0.35, 0.6, 1.0, 1.8), 0.8
"""How far along an axis, of length 1, goodput stays alike."""
_AMPLITUDES = (0.1, 0.2, 0.4, 0.8)
"""How far goodput's logarithm moves over all settings."""
_MOST_FITS = 300
_WORST, _FAILED = -2.5, -0.4
"""Logarithms of goodput over the best: less is not told apart, and what failed counts as no better than that."""
_WORTHWHILE = 0.001
"""Expected improvement that is worth a trial, as a share."""


@dataclass(frozen=True, slots=True)
class Ended:
    """No more trials."""

    why: str


class SettingsSearch:
    """Ask for a point, measure it, tell its goodput, until it has ended."""

    def __init__(self, sizes: Sequence[int], first: Point, max_trials: int = 12) -> None:
        """Search among `sizes[i]` candidates of the i-th setting, beginning at `first`."""
        self._first = first
        self._max_trials = max_trials
        self._points = list(itertools.product(*map(range, sizes)))
        spans = np.maximum(np.array(sizes) - 1, 1)
        self._places: _Floats = np.array(self._points, dtype=np.float64) / spans
        self._index = {point: index for index, point in enumerate(self._points)}
        self._least_trials = 2 * len(sizes) + 2
        self._told: dict[int, float] = {}

    def next(self) -> Point | Ended:
        """The point to measure next."""
        if not self._told:
            return self._first
        if len(self._told) == len(self._points):
            return Ended("every combination was tried")
        if len(self._told) >= self._max_trials:
            return Ended(f"{self._max_trials} trials were made, as --max-trials allows")
        surface = self._surface()
        tried = list(self._told)
        mean, deviation = surface.at(self._places)
        improvement = _expected_improvement(mean, deviation, float(mean[tried].max()))
        improvement[tried] = -1.0
        if len(self._told) >= self._least_trials and improvement.max() < _WORTHWHILE:
            return Ended(f"no combination that is left promises {_WORTHWHILE:.1%} more")
        return self._points[int(improvement.argmax())]

    def tell(self, point: Point, goodput: float) -> None:
        """Note what a trial measured; 0 where it failed."""
        self._told[self._index[point]] = goodput

    def best(self) -> Point | None:
        """Of the points that were measured and did not fail, the highest of the smoothed surface."""
        working = [index for index, goodput in self._told.items() if goodput > 0]
        if not working:
            return None
        mean, _ = self._surface().at(self._places[working])
        return self._points[working[int(mean.argmax())]]

    def _surface(self) -> _Surface:
        return _fit(self._places[list(self._told)], _logarithms(list(self._told.values())))


@dataclass(frozen=True, slots=True)
class _Surface:
    """What is believed of goodput everywhere."""

    places: _Floats
    """[trials, settings]"""
    scales: _Floats
    amplitude: float
    mean: float
    factor: _Floats
    """Lower Cholesky factor of the trials' covariance."""
    weights: _Floats

    def at(self, places: _Floats) -> tuple[_Floats, _Floats]:
        """Mean and standard deviation of goodput's logarithm at each of `places`, [points, settings]."""
        covariance = self.amplitude**2 * _likeness(self.places, places, self.scales)
        known = np.linalg.solve(self.factor, covariance)
        variance = self.amplitude**2 - (known**2).sum(0)
        return self.mean + covariance.T @ self.weights, np.sqrt(np.maximum(variance, 1e-12))


def _fit(places: _Floats, values: _Floats) -> _Surface:
    """The surface under which the values are most likely, among few scales and amplitudes."""
    num_settings = places.shape[1]
    if len(_SCALES) ** num_settings <= _MOST_FITS:
        all_scales = list(itertools.product(_SCALES, repeat=num_settings))
    else:
        all_scales = [(scale,) * num_settings for scale in _SCALES]
    mean = float(values.mean())
    best: tuple[float, _Surface] | None = None
    for scales in map(np.array, all_scales):
        likeness = _likeness(places, places, scales)
        surprise = float((np.log(scales / _LIKELY_SCALE) ** 2).sum())
        for amplitude in _AMPLITUDES:
            covariance = amplitude**2 * likeness + _NOISE**2 * np.eye(len(values))
            factor: _Floats = np.linalg.cholesky(covariance).astype(np.float64)
            half = np.linalg.solve(factor, values - mean)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum()) - surprise
            if best is None or likelihood > best[0]:
                weights = np.linalg.solve(factor.T, half)
                best = likelihood, _Surface(places, scales, amplitude, mean, factor, weights)
    assert best is not None
    return best[1]


def _likeness(rows: _Floats, columns: _Floats, scales: _Floats) -> _Floats:
    """How much alike goodput is at each two places: 1 at the same one, falling as a Gaussian."""
    distance: _Floats = ((rows[:, None, :] - columns[None, :, :]) / scales) ** 2
    likeness: _Floats = np.exp(-0.5 * distance.sum(-1))
    return likeness


def _logarithms(goodputs: Sequence[float]) -> _Floats:
    """Of each goodput over the best; a failed one is told from the others without a cliff that would bend all."""
    top = max(goodputs)
    working = [math.log(goodput / top) for goodput in goodputs if goodput > 0]
    failed = min([_FAILED, *working])
    values = [math.log(goodput / top) if goodput > 0 else failed for goodput in goodputs]
    bounded: _Floats = np.maximum(np.array(values, dtype=np.float64), _WORST)
    return bounded


def _expected_improvement(mean: _Floats, deviation: _Floats, best: float) -> _Floats:
    away = (mean - best) / deviation
    below = np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in away])
    density: _Floats = np.exp(-0.5 * away**2) / math.sqrt(2 * math.pi)
    improvement: _Floats = deviation * (away * below + density)
    return improvement


def grid_start(axes: Mapping[str, Sequence[object]], defaults: Mapping[str, object]) -> Point:
    """Where a search begins: at each setting's default if it is a candidate, else in the middle."""
    return tuple(
        values.index(defaults[name]) if defaults.get(name) in values else (len(values) - 1) // 2
        for name, values in axes.items()
    )
