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


def plot_lines(lines: Mapping[str, Sequence[tuple[float, float]]], labels: tuple[str, str, str], path: Path) -> None:
    """Lines over a logarithmic x axis, as PNG; `labels`: title, x axis, y axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415 an extra

    title, x_label, y_label = labels
    figure = Figure(figsize=(6, 4), layout="constrained")
    place = figure.subplots()
    for name, points in lines.items():
        place.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    place.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log")
    place.grid(alpha=0.3)
    place.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
