"""Carries a growing load on into the future, as far as a new engine takes to start."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_operator.autoscale.state import Moment

LEAST_FIT = 0.85
"""Share of the load's variance that a straight line has to explain: noise is no trend, nor is a single step, of which
a line explains 0.75, and somewhat more through a window of flows."""
MOST_GROWTH = 1.5
"""Nobody trusts a line further than this times the load."""


def projected(history: Sequence[Moment], load: float, now: float, window_s: float, ahead_s: float) -> float:
    """Return the load in `ahead_s` seconds, at least that of now.

    Args:
        history: what was seen, oldest first.
        load: of now.
        now: monotonic seconds.
        window_s: how much of the history counts.
        ahead_s: how far to look.
    """
    line = _line(history, load, now, window_s)
    if line is None or line[1] <= 0:
        return load
    fitted, slope = line
    return max(load, min(fitted + slope * ahead_s, MOST_GROWTH * max(load, fitted)))


def _line(history: Sequence[Moment], load: float, now: float, window_s: float) -> tuple[float, float] | None:
    """Return what the line has now and how it grows a second; None: no line fits that well."""
    points = [(one.at - now, one.load) for one in history if one.load is not None and one.at > now - window_s]
    points.append((0.0, load))
    span = -points[0][0]
    if len(points) < 10 or span < window_s / 2:
        return None
    count = len(points)
    mean_t, mean_v = sum(t for t, _ in points) / count, sum(v for _, v in points) / count
    tt = sum((t - mean_t) ** 2 for t, _ in points)
    tv = sum((t - mean_t) * (v - mean_v) for t, v in points)
    vv = sum((v - mean_v) ** 2 for _, v in points)
    if tt <= 0 or vv <= 0 or tv * tv / (tt * vv) < LEAST_FIT:
        return None
    slope = tv / tt
    return mean_v - slope * mean_t, slope
