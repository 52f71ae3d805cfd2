"""Order statistics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = (50, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, linear between neighbours; `values` in any order, at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> Mapping[str, float]:
    """Mean and the percentiles that reports show; empty for no values."""
    if not values:
        return {}
    return {"mean": sum(values) / len(values)} | {f"p{share}": percentile(values, share) for share in SHOWN}
