"""Draws what the simulator found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_rates(sweep: Mapping[str, Any], path: Path) -> None:
    """Draw TTFT and hits over the rate of requests, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, by_rate in sweep.items():
        rates = [float(rate) for rate in by_rate]
        style = "-" if name.startswith("auto") else "--"
        left.plot(rates, [one["ttft_p90"] for one in by_rate.values()], style, label=name)
        right.plot(rates, [100 * one["hit_rate"] for one in by_rate.values()], style, label=name)
    left.set(yscale="log", xlabel="requests/s", ylabel="TTFT p90, s")
    right.set(xlabel="requests/s", ylabel="prompt tokens from a cache, %")
    right.legend(fontsize=7)
    _save(figure, path)


def plot_traces(traces: Mapping[str, Any], path: Path) -> None:
    """Draw TTFT p90 for each trace, a bar for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4 * ((len(traces) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(traces) + 1) // 2, 2, squeeze=False).flat
    for (trace, by_policy), axis in zip(traces.items(), axes, strict=False):
        names = list(by_policy)[::-1]
        colours = ["tab:blue" if name.startswith("auto") else "tab:gray" for name in names]
        axis.barh(names, [by_policy[name]["ttft_p90"] for name in names], color=colours)
        axis.set(xscale="log", title=trace, xlabel="TTFT p90, s")
        axis.tick_params(labelsize=6)
    for axis in list(figure.axes)[len(traces) :]:
        axis.set_visible(False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pagefleet"}):
        figure.savefig(path, metadata={"Date": None})
