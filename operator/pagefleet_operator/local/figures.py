"""What each engine does, from its metrics: asked every other second, while a table shows it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.engine_history import EngineHistory

from pagefleet_operator.local.probe import METRICS_PATH, fetch


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine now. None: it does not say, or there was nothing to measure."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of its K/V blocks in use."""
    tokens_s: float | None = None
    """Tokens generated a second, of the last seconds."""
    hit_ratio: float | None = None
    """Share of the prompts' tokens that its cache had, of the last minute."""


def together(ranks: Sequence[EngineFigures]) -> EngineFigures | None:
    """Return what the data ranks of an engine do: sums, and means of shares; None: none of them says."""
    if len(ranks) <= 1:
        return ranks[0] if ranks else None

    def known(name: str) -> list[float]:
        return [value for one in ranks if (value := getattr(one, name)) is not None]

    sums = {name: sum(found) for name in ("running", "waiting", "tokens_s") if (found := known(name))}
    means = {name: fmean(found) for name in ("kv_usage", "hit_ratio") if (found := known(name))}
    return EngineFigures(**sums, **means)


class FigureWatch:
    """Keeps what engines said last; `run` until it is cancelled."""

    def __init__(self, period_s: float, timeout_s: float, engines: Callable[[], Mapping[str, str]]) -> None:
        """`engines` returns the base URLs of those that are ready, by name; each gets `timeout_s` for its answer."""
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._engines = engines
        self._histories: dict[str, EngineHistory] = {}
        self.figures: Mapping[str, EngineFigures] = {}
        """By name; of those that answered."""

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self._period_s)

    async def step(self) -> None:
        """Ask each engine once."""
        urls = self._engines()
        pages = await asyncio.gather(*(fetch(url + METRICS_PATH, self._timeout_s) for url in urls.values()))
        now = time.monotonic()
        self._histories = {name: self._histories.get(name, EngineHistory()) for name in urls}
        told = {name: page for name, page in zip(urls, pages, strict=True) if page is not None}
        self.figures = {name: read_figures(page, self._histories[name], now) for name, page in told.items()}


def read_figures(page: bytes, history: EngineHistory, now: float) -> EngineFigures:
    """Read an exposition that came at a monotonic time; `history` remembers those before it."""
    history.note(page, now)
    recent = history.recent()
    return EngineFigures(
        running=_gauge(page, names.ENGINE_REQUESTS_RUNNING),
        waiting=_gauge(page, names.ENGINE_REQUESTS_WAITING),
        kv_usage=_gauge(page, names.ENGINE_KV_USAGE_RATIO),
        tokens_s=recent.generated_tokens_s,
        hit_ratio=recent.prefix_hit_ratio,
    )


def _gauge(page: bytes, name: str) -> float | None:
    found = re.search(rb"^" + name.encode() + rb"(?:\{[^\n]*\})? ([0-9.e+-]+)$", page, re.MULTILINE)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
