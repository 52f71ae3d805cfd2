"""Profiles of the engine's steps: one at a time, each for a while."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from pagefleet_engine.errors import ProfileRefused
from pagefleet_engine.executor.trace import StepTrace, ThreadTrace

MAX_S = 10.0
MAX_STEPS = 200
"""A profile ends by itself after either: until then it is kept in memory (a minute of sixteen streams on a CPU took
11 GB), and writing it takes longer than recording it."""

_log = logging.getLogger(__name__)


class StepProfiler:
    """At most one profile at a time. All methods belong to the thread of the engine's core.

    Args:
        folder: gets the traces; it exists.
        trace: records them; default: the thread that calls.
    """

    def __init__(self, folder: Path, trace: StepTrace | None = None) -> None:
        self._folder = folder
        self._trace = trace or ThreadTrace()
        self._is_on = False
        self._began = 0.0
        self._num_steps = 0
        self._written: Path | None = None
        """By `end`, and not told yet."""

    def is_full(self) -> bool:
        """Whether a profile that nobody ended is long enough."""
        is_long = time.monotonic() - self._began >= MAX_S or self._num_steps >= MAX_STEPS
        return self._is_on and is_long

    def count_step(self) -> None:
        """A step is done."""
        self._num_steps += 1

    def start(self) -> None:
        """Begin to record; the first time takes some seconds.

        Raises:
            ProfileRefused: it records already, or cannot.
        """
        if self._is_on:
            raise ProfileRefused("A profile is being recorded already: end it by POST /stop_profile.")
        self._trace.start()
        self._is_on, self._written = True, None
        self._began, self._num_steps = time.monotonic(), 0

    def stop(self) -> Path:
        """End the profile and write it; takes seconds for a long one. Returns what `StepTrace.stop` does.

        Raises:
            ProfileRefused: there is none, or it cannot be written.
        """
        if not self._is_on:
            if self._written is None:
                raise ProfileRefused("No profile is being recorded: begin one by POST /start_profile.")
            path, self._written = self._written, None
            return path
        self._is_on = False
        stem = self._folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns():x}"
        path = self._trace.stop(stem)
        _log.info("wrote a profile of %.1f s to %s", time.monotonic() - self._began, path)
        return path

    def end(self) -> None:
        """End a profile that is full; who asks for it later is told where it lies."""
        try:
            self._written = self.stop()
        except ProfileRefused as error:
            _log.warning("%s", error)
