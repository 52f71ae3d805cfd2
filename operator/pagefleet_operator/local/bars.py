"""Bars of what takes a while: a model that is loaded or downloaded."""

from __future__ import annotations

from pagefleet_protocol.load_progress import LoadProgress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 16


def load_line(progress: LoadProgress, hint: str = "") -> Table:
    """Return what an engine does before it is ready, in one line; `hint`: its own words, where it tells no more."""
    told = Text(hint if progress.phase == "starting" and hint else progress.describe())
    return bar_line(progress.share, Text.assemble(told, f", {short_time(progress.seconds)}"))


def bar_line(share: float | None, told: Text) -> Table:
    """Return a bar, where there is something to measure, and what is told beside it: never more than one line."""
    line = Table.grid(padding=(0, 1), expand=True)
    if share is not None:
        line.add_column(width=BAR_WIDTH, no_wrap=True)
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    told.no_wrap = True
    cells = [told] if share is None else [ProgressBar(1.0, share, width=BAR_WIDTH), told]
    line.add_row(*cells)
    return line


def short_time(seconds: float) -> str:
    """Return a time that went by, briefly: `42s`, `3m05s`, `2h10m`, `3d04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
