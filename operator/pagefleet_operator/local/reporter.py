"""What a person sees of the fleet: plain lines, or a table that stays at the bottom of a terminal.

All output goes through one thread with a bounded queue: a terminal that is stopped or a pipe that nobody reads never
stops the fleet; what does not fit is dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from pagefleet_operator.local.table import ServiceView, status_table

_QUEUE_LENGTH = 10_000
_FLUSH_S = 2.0
_REDRAW_S = 0.5
"""Between two looks at whether the table has changed: a calm table is one that can be read."""


class Reporter(Protocol):
    """Whom the fleet tells what happens."""

    @property
    def wants_figures(self) -> bool:
        """Whether it shows what engines do from second to second."""

    def say(self, text: str) -> None:
        """Tell something of the fleet itself."""

    def log(self, instance: str, line: str) -> None:
        """Pass on a line that a process wrote."""

    def show(self, services: Sequence[ServiceView]) -> None:
        """Show the whole as it is now."""

    def close(self) -> None:
        """Write what is still queued."""


class OutputThread:
    """Runs writes in order on a thread of its own, and `now_and_then` twice a second."""

    def __init__(self, now_and_then: Callable[[], None] | None = None) -> None:
        self.num_dropped = 0
        """Writes that found the queue full."""
        self._now_and_then = now_and_then
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], None]) -> None:
        """Have `write` called soon; never blocks."""
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Wait a moment for what is queued."""
        try:
            self._queue.put(None, timeout=_FLUSH_S)
        except queue.Full:
            return  # nobody reads; the thread ends with the process
        self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        deaf, due = False, time.monotonic()
        while (write := self._next(due)) is not None:
            if time.monotonic() >= due:
                due = time.monotonic() + _REDRAW_S
            if deaf:
                continue
            try:
                write()
            except (OSError, ValueError):
                deaf = True  # the reader has gone; there is nobody to tell

    def _next(self, due: float) -> Callable[[], None] | None:
        """Return what is to be written next; None: the end."""
        if self._now_and_then is None:
            return self._queue.get()
        left = due - time.monotonic()
        if left <= 0:
            return self._now_and_then
        try:
            return self._queue.get(timeout=left)
        except queue.Empty:
            return self._now_and_then


class PlainReporter:
    """Lines without any control sequence, for pipes and files."""

    wants_figures = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._output = OutputThread()

    def say(self, text: str) -> None:
        """Write a line; several when `text` has several."""
        self._write(f"{text}\n")

    def log(self, instance: str, line: str) -> None:
        self._write(f"{instance} | {line}\n")

    def show(self, services: Sequence[ServiceView]) -> None:
        """Nothing: each change was already said."""

    def close(self) -> None:
        self._output.close()

    def _write(self, text: str) -> None:
        def write() -> None:
            self._stream.write(text)
            self._stream.flush()

        self._output.put(write)


class LiveReporter:
    """Lines that scroll above a table of all instances, which is drawn anew twice a second where it has changed.

    Args:
        console: a terminal.
        clock: monotonic seconds.
    """

    wants_figures = True

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown: Sequence[ServiceView] = ()
        self._drawn: list[list[Segment]] = []
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._output = OutputThread(self._redraw)
        self._output.put(self._live.start)

    def say(self, text: str) -> None:
        """Print a line above the table; never broken, so that commands can be copied."""
        self._output.put(lambda: self._console.print(Text(text), soft_wrap=True))

    def log(self, instance: str, line: str) -> None:
        text = Text.assemble((f"{instance} | ", "dim"), line)
        self._output.put(lambda: self._console.print(text, soft_wrap=True))

    def show(self, services: Sequence[ServiceView]) -> None:
        """Show this from the next time on that the table is drawn."""
        self._shown = tuple(services)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._output.put(self._redraw)
        self._output.put(self._live.stop)
        self._output.close()

    def _redraw(self) -> None:
        table = status_table(self._shown, self._clock())
        lines = self._console.render_lines(table, pad=False)
        if lines != self._drawn:
            self._drawn = lines
            self._live.update(table, refresh=True)
