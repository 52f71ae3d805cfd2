"""Plots of the autoscaling simulator: engines over time, and what each policy reaches for what it pays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt


def plot(folder: Path, outcomes: Sequence[Any], traces: Sequence[Any]) -> None:
    """Write docs/autoscaling-engines.svg and docs/autoscaling-peers.svg into a folder."""
    mpl.rcParams.update({"svg.hashsalt": "pagefleet", "font.size": 8, "axes.spines.top": False})
    figure, axes = plt.subplots(len(traces), 1, figsize=(8, 2 * len(traces)), layout="constrained")
    for axis, trace in zip(axes, traces, strict=True):
        for policy in ("pagefleet", "hpa, requests", "llm-d token-aware"):
            for one in outcomes:
                if (one.trace, one.policy, one.seed) == (trace.name, policy, 1):
                    times, counts = zip(*one.line, strict=True)
                    ends = [at / 60 for at in (*times, trace.seconds)]
                    axis.step(ends, [*counts, counts[-1]], where="post", label=policy)
        axis.set(title=trace.name, ylabel="engines wanted", ylim=(0, 8.5))
    axes[0].legend(ncols=3, frameon=False, loc="upper left")
    axes[-1].set_xlabel("minutes")
    figure.savefig(folder / "autoscaling-engines.svg", metadata={"Date": None})
    figure, axes = plt.subplots(1, len(traces), figsize=(3 * len(traces), 3), sharey=True, layout="constrained")
    for axis, trace in zip(axes, traces, strict=True):
        for policy in dict.fromkeys(one.policy for one in outcomes):
            mine = [one for one in outcomes if (one.trace, one.policy) == (trace.name, policy)]
            paid = sum(one.mean_engines for one in mine) / len(mine)
            reached = sum(one.within_targets for one in mine) / len(mine)
            axis.scatter(paid, 100 * reached, label=policy)
        axis.axhline(96, linewidth=0.5, color="grey")
        axis.set(title=trace.name, xlabel="mean engines")
    axes[0].set_ylabel("% of requests within targets")
    axes[-1].legend(frameon=False)
    figure.savefig(folder / "autoscaling-peers.svg", metadata={"Date": None})
    plt.close("all")
