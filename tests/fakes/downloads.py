"""Downloads that lose no time: settings without pauses, and one call that waits for the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagefleet_download.download import download
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings, Host, Patience
from pagefleet_protocol.model_facts import DownloadResult


class Pauses:
    """A sleep that takes no time and remembers."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


def fast(pauses: Pauses | None = None, free_bytes: int = 1 << 40, **changes: Any) -> DownloadSettings:
    """Settings for tests: no pauses, plenty of space."""
    host = Host(sleep=pauses or Pauses(), free_bytes=lambda _: free_bytes)
    return replace(DownloadSettings(host=host, patience=Patience(stall=60)), **changes)


def run(uri: str, folder: Path, settings: DownloadSettings, meter: ProgressMeter | None = None) -> DownloadResult:
    """Download, and wait for it."""
    return asyncio.run(download(uri, folder, settings, meter or ProgressMeter()))


def visible(folder: Path) -> set[str]:
    """Names in a folder that an engine may look at."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
