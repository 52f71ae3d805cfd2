"""Figures as pictures, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pagefleet_engine.errors import ConfigError


def require_matplotlib() -> None:
    """Raises ConfigError where pictures cannot be drawn: ask before measuring."""
    try:
        import matplotlib  # noqa: F401, PLC0415 an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'pagefleet-engine[bench]'") from None


def plot_distributions(values_ms: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Cumulative distributions side by side, milliseconds on the x axis, as PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 an extra; without pyplot there is no global state

    figure = Figure(figsize=(4 * len(values_ms), 3), layout="constrained")
    figure.suptitle(title)
    for place, (name, values) in zip(
        figure.subplots(1, len(values_ms), squeeze=False)[0], values_ms.items(), strict=True
    ):
        ordered = sorted(values)
        place.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])
        place.set(title=name, xlabel="ms", ylim=(0, 1))
        place.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def plot_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], labels: tuple[str, str], path: Path) -> None:
    """A panel for each group, in it a row for each size with a bar for each of its values, as PNG.

    `labels`: title, and what the values are.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 an extra

    title, value_label = labels
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(sizes) for sizes in panels.values())
    figure = Figure(figsize=(6 * columns, rows * (1.2 + 0.3 * tallest)), layout="constrained")
    figure.suptitle(title)
    places = [place for line in figure.subplots(rows, columns, squeeze=False) for place in line]
    for place, (group, sizes) in zip(places, panels.items(), strict=False):
        names = list(dict.fromkeys(name for values in sizes.values() for name in values))
        height = 0.8 / len(names)
        for index, name in enumerate(names):
            found = [
                (row + index * height, values[name]) for row, values in enumerate(sizes.values()) if name in values
            ]
            place.barh([y for y, _ in found], [value for _, value in found], height, align="edge", label=name)
        place.set_yticks([row + 0.4 for row in range(len(sizes))], list(sizes))
        place.invert_yaxis()
        place.set(title=group, xlabel=value_label)
        place.grid(axis="x", alpha=0.3)
        place.legend(loc="lower right")
    for place in places[len(panels) :]:
        place.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
