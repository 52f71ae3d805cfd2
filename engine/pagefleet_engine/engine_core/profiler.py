"""Records what the core's thread and its device do for a while, as a trace that Perfetto opens (ui.perfetto.dev)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pagefleet_engine.errors import ProfileRefused

if TYPE_CHECKING:
    import torch

MAX_S = 10.0
MAX_STEPS = 200
"""A profile ends by itself after either: until then it is kept in memory (a minute of sixteen streams on a CPU took
11 GB), and writing it takes longer than recording it."""

_log = logging.getLogger(__name__)


class StepProfiler:
    """At most one profile at a time. All methods belong to the thread whose work is recorded.

    Args:
        folder: gets the traces; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: torch.profiler.profile | None = None
        self._began = 0.0
        self._num_steps = 0
        self._written: Path | None = None
        """By `end`, and not told yet."""

    def is_full(self) -> bool:
        """Whether a profile that nobody ended is long enough."""
        is_long = time.monotonic() - self._began >= MAX_S or self._num_steps >= MAX_STEPS
        return self._profile is not None and is_long

    def count_step(self) -> None:
        """A step is done."""
        self._num_steps += 1

    def start(self) -> None:
        """Begin to record; the first time takes some seconds.

        Raises:
            ProfileRefused: it records already, or cannot.
        """
        if self._profile is not None:
            raise ProfileRefused("A profile is being recorded already: end it by POST /stop_profile.")
        from torch import profiler  # noqa: PLC0415 few cores ever record

        profile = profiler.profile()
        try:
            profile.start()
        except Exception as error:  # torch's, and of the device's library, which another profiler may hold
            raise ProfileRefused(f"No profile can be recorded: {error}") from error
        self._profile, self._written = profile, None
        self._began, self._num_steps = time.monotonic(), 0

    def stop(self) -> Path:
        """End the profile and write it; takes seconds for a long one.

        Raises:
            ProfileRefused: there is none, or it cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            if self._written is None:
                raise ProfileRefused("No profile is being recorded: begin one by POST /start_profile.")
            path, self._written = self._written, None
            return path
        path = self._folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns():x}.json.gz"
        try:
            profile.stop()
            profile.export_chrome_trace(str(path))
        except Exception as error:  # as in `start`; and of the disk
            reason = error.strerror if isinstance(error, OSError) else error
            raise ProfileRefused(f"The profile cannot be written to {path.parent}: {reason}.") from error
        _log.info("wrote a profile of %.1f s to %s", time.monotonic() - self._began, path)
        return path

    def end(self) -> None:
        """End a profile that is full; who asks for it later is told where it lies."""
        try:
            self._written = self.stop()
        except ProfileRefused as error:
            _log.warning("%s", error)
