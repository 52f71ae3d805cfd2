"""How far short peaks of the load stand above its mean: learned for a quarter of an hour, as bursts come again.

An engine takes longer to start than most bursts last, so it has to be there before; and between two bursts it must not
go. What was seen is a ratio, so it rises and falls with the load: capacity follows a falling load within minutes though
bursts are remembered for longer. Poisson noise is such a peak as well, and the ratio grows where there is more of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_operator.autoscale.state import Moment

LEVEL_S = 60.0
"""Over which the mean is the load's level."""
AROUND_S = 150.0
"""A moment's load is compared with the mean of so long a time around it."""
MEMORY_S = 900.0
SHARE = 0.9
"""Of the moments that the ratio covers; targets are for nineteen of twenty requests, and a mean lags its peaks."""
MOST = 1.6
"""A load that stands further above its mean is no burst, but another load."""
LEAST_RISE = 0.1
"""Of an engine: a load that grows by less in the time between the two means stays as it is."""
LEAST_LOAD = 0.3
"""Of an engine: what a few requests do beside less than that says nothing."""


def level(history: Sequence[Moment], now: float) -> float:
    """Return the mean load of the last LEVEL_S seconds; 0 where none was seen."""
    return _mean(history, now - LEVEL_S) or 0.0


def rises(history: Sequence[Moment], now: float) -> bool:
    """Return whether the load's level is above its mean of AROUND_S: what goes now would be wanted back."""
    around = _mean(history, now - AROUND_S)
    return around is not None and level(history, now) > around + LEAST_RISE


def surge_seen(history: Sequence[Moment], now: float) -> float:
    """Return the load half of AROUND_S ago over the mean around it, at least 1; 1 where not all of that was seen.

    Args:
        history: what was seen, oldest first, this moment included.
        now: monotonic seconds.
    """
    around = _mean(history, now - AROUND_S)
    middle = next((one.load for one in history if one.at >= now - AROUND_S / 2), None)
    if around is None or middle is None or around < LEAST_LOAD or history[0].at > now - AROUND_S:
        return 1.0
    return min(MOST, max(1.0, middle / around))


def surge_learned(history: Sequence[Moment], now: float) -> float:
    """Return the ratio that SHARE of the remembered moments stayed within."""
    seen = sorted(one.surge for one in history if one.at >= now - MEMORY_S)
    return seen[min(len(seen) - 1, int(SHARE * len(seen)))] if seen else 1.0


def _mean(history: Sequence[Moment], since: float) -> float | None:
    loads = [one.load for one in history if one.load is not None and one.at > since]
    return sum(loads) / len(loads) if loads else None
