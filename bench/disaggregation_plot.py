"""Draws the sweep: what two engines give as a pair, and each for whole requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROWS = (("ttft_p90_ms", "TTFT p90, ms"), ("itl_p99_ms", "ITL p99, ms"), ("good_share", "good requests, share"))
STYLES = (("colocated", "two for whole requests", "--"), ("pair", "prefill and decode apart", "-"))


def plot_sweep(by_length: Mapping[str, Any], path: Path) -> None:
    """Draw a column for each prompt length and a row for each figure, over the load."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(by_length), 2.2 * len(ROWS)), layout="constrained")
    axes = figure.subplots(len(ROWS), len(by_length), sharex=True, sharey="row", squeeze=False)
    for column, (length, found) in enumerate(by_length.items()):
        loads = [float(load) for load in found["by_load"]]
        for row, (name, label) in enumerate(ROWS):
            axis = axes[row][column]
            for fleet, text, style in STYLES:
                axis.plot(
                    loads, [cell[fleet][name] for cell in found["by_load"].values()], style, marker=".", label=text
                )
            if name.endswith("_ms"):
                axis.set_yscale("log")
            if not column:
                axis.set_ylabel(label)
        axes[0][column].set_title(f"{int(length):,} tokens")
        axes[-1][column].set_xlabel("load")
    axes[-1][0].legend(fontsize=7)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pagefleet"}):
        figure.savefig(path, metadata={"Date": None})
