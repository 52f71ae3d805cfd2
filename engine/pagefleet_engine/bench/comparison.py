"""Several servers or loads: measured in turns, so that what drifts with time hits all alike, and shown side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagefleet_engine.bench.measured import Measured
from pagefleet_engine.bench.offered_load import LoadPoint
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.plot import plot_curves, plot_distributions
from pagefleet_engine.errors import ConfigError

Cell = tuple[LoadPoint, str]
"""A load, and the server that had it."""
_COLUMNS = (
    ("requests/s", "requests_per_s", None),
    ("tokens/s", "output_tokens_per_s", None),
    ("TTFT p50", "ttft_ms", "p50"),
    ("TTFT p99", "ttft_ms", "p99"),
    ("TPOT p50", "tpot_ms", "p50"),
    ("TPOT p99", "tpot_ms", "p99"),
    ("goodput", "goodput_requests_per_s", None),
)
_AXES = {
    "ttft": "time to the first token, ms",
    "tpot": "mean time per token after it, ms",
    "itl": "time between two tokens, ms",
    "e2e": "time to the last token, ms",
}


def named_urls(given: Sequence[str]) -> Mapping[str, str]:
    """From ["a=http://host:1/v1", "http://host:2"] to base URLs by name, which end in /v1.

    Raises:
        ConfigError: one is no URL, or two have one name.
    """
    found: dict[str, str] = {}
    for text in given:
        before, equals, after = text.partition("=")
        named = bool(equals) and "://" not in before
        url = (after if named else text).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or (named and not before):
            raise ConfigError(f"--base-url {text[:80]!r}: give URL or NAME=URL, as ours=http://127.0.0.1:8000/v1")
        name = before if named else parts.netloc
        if name in found:
            raise ConfigError(f"--base-url has two servers that are called {name}: name them, as a=URL b=URL")
        found[name] = url if parts.path else f"{url}/v1"
    return found


def in_turns(points: Sequence[LoadPoint], servers: Sequence[str], rounds: int) -> Iterator[tuple[int, Cell]]:
    """Yield each run with the number of its prompts: the same for all servers, and no two runs of one have the same.

    Another server begins each time, also at the same load, and all loads are through before one comes again.
    """
    for number in range(rounds * len(points)):
        first = (number + number // len(points)) % len(servers)
        for server in (*servers[first:], *servers[:first]):
            yield number, (points[number % len(points)], server)


def table(measured: Mapping[Cell, Measured], slo: dict[str, float]) -> str:
    """A line for each server at each load; where there are several servers, with ratios over the first of them."""
    first = next(server for _, server in measured)
    columns = [column for column in _COLUMNS if slo or column[0] != "goodput"]
    lines = [["load", "server", *(title for title, _, _ in columns)]]
    values: dict[Cell, list[float | None]] = {}
    for (point, server), found in measured.items():
        figures = found.figures(slo)
        row = [_value(figures, key, share) for _, key, share in columns]
        values[point, server] = row
        lines.append([str(point), server, *("" if value is None else _shown(value) for value in row)])
        if server != first:
            lines.append(["", f"/ {first}", *map(_ratio, row, values[point, first])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )


def ratios(measured: Mapping[Cell, Measured], slo: dict[str, float]) -> Mapping[str, Any]:
    """By server after the first and by load, its figures over the first one's."""
    first = next(server for _, server in measured)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (point, server), one in measured.items():
        if server == first:
            continue
        own, other = one.figures(slo), measured[point, first].figures(slo)
        row = found.setdefault(f"{server}_over_{first}", {}).setdefault(str(point), {})
        for _, key, share in _COLUMNS:
            a, b = _value(own, key, share), _value(other, key, share)
            if a is not None and b:
                row[key if share is None else f"{key.removesuffix('_ms')}_{share}"] = a / b
    return found


def rows(measured: Mapping[Cell, Measured], slo: dict[str, float]) -> list[Mapping[str, Any]]:
    """All figures of each server at each load, for JSON."""
    return [
        {
            "server": server,
            "request_rate": "all at once" if point.rate == float("inf") else point.rate,
            "max_concurrency": point.max_concurrency,
            **found.figures(slo),
        }
        for (point, server), found in measured.items()
    ]


def draw(measured: Mapping[Cell, Measured], path: Path) -> None:
    """Distributions of the latencies at one load, of several loads curves of latency over throughput, as a picture."""
    points = list(dict.fromkeys(point for point, _ in measured))
    servers = list(dict.fromkeys(server for _, server in measured))
    if len(points) == 1:
        values = {
            label: {server: found.latencies_ms[measure] for (_, server), found in measured.items()}
            for measure, label in _AXES.items()
        }
        plot_distributions(values, f"Latencies, {points[0]}", path)
        return
    panels: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for measure in ("ttft", "tpot"):
        for share in (50, 99):
            lines = panels.setdefault(f"p{share} of {_AXES[measure]}", {})
            for server in servers:
                cells = [(point, measured[point, server]) for point in points if (point, server) in measured]
                lines[server] = [
                    (
                        found.num_output_tokens / found.seconds,
                        percentile(found.latencies_ms[measure], share),
                        str(point),
                    )
                    for point, found in cells
                    if found.latencies_ms[measure]
                ]
    plot_curves(panels, ("Latency over throughput", "output tokens per second"), path)


def _value(figures: Mapping[str, Any], key: str, share: str | None) -> float | None:
    found = figures.get(key)
    if share is not None:
        found = (found or {}).get(share)
    return found


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _ratio(value: float | None, other: float | None) -> str:
    return f"x{value / other:.2f}" if value is not None and other else ""
