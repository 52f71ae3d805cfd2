"""Figures as pictures, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises ConfigError where pictures cannot be drawn: ask before measuring."""
    try:
        import matplotlib  # noqa: F401, PLC0415 an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'pagefleet-engine[bench]'") from None


def plot_distributions(panels: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path) -> None:
    """Cumulative distributions side by side, as PNG.

    Args:
        panels: by what the values are, which labels the x axis, and by whose they are.
        title: over all panels.
        path: of the picture; its folder is made.
    """
    figure, places = _panels(len(panels), min(4, len(panels)), (4.0, 3.2), title)
    for place, (label, lines) in zip(places, panels.items(), strict=True):
        for name, values in lines.items():
            ordered = sorted(values)
            place.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=name)
        place.set(xlabel=label, ylabel="share that took no longer", ylim=(0, 1))
        place.grid(alpha=0.3)
        if len(lines) > 1:
            place.legend(loc="lower right")
    _save(figure, path)


def plot_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]], labels: tuple[str, str], path: Path
) -> None:
    """Lines through points (x, y, what the point is called) side by side, as PNG.

    Args:
        panels: by what y is, which labels that axis, and by whose line it is.
        labels: title, and what x is.
        path: of the picture; its folder is made.
    """
    title, x_label = labels
    figure, places = _panels(len(panels), min(2, len(panels)), (6.0, 3.8), title)
    for place, (y_label, lines) in zip(places, panels.items(), strict=True):
        for name, points in lines.items():
            place.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=name)
            for x, y, called in points:
                place.annotate(called, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        place.set(xlabel=x_label, ylabel=y_label)
        right = max((x for points in lines.values() for x, _, _ in points), default=0.0)
        place.set_xlim(0, 1.2 * right or 1.0)  # room for the names of the last points
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        if len(lines) > 1:
            place.legend(loc="best")
    _save(figure, path)


def plot_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], labels: tuple[str, str], path: Path) -> None:
    """A panel for each group, in it a row for each size with a bar for each of its values, as PNG.

    `labels`: title, and what the values are.
    """
    title, value_label = labels
    tallest = max(len(sizes) for sizes in panels.values())
    figure, places = _panels(len(panels), min(2, len(panels)), (6.0, 1.2 + 0.3 * tallest), title)
    for place, (group, sizes) in zip(places, panels.items(), strict=True):
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
    _save(figure, path)


def _panels(count: int, columns: int, size: tuple[float, float], title: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, each of this size in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 an extra; without pyplot there is no global state

    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    figure.suptitle(title)
    places = [place for line in figure.subplots(rows, columns, squeeze=False) for place in line]
    for place in places[count:]:
        place.set_axis_off()
    return figure, places[:count]


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
