"""SIGTERM before a program listens for it, which takes seconds of imports, or a minute of them on a busy machine.

The first process of a container ignores signals that it has no handler for: its pod would stay for all of its grace
period.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Until something within the block listens for it, SIGTERM ends the process at once; for the main thread."""
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_at_once(number: int, _: object) -> None:
    os._exit(128 + number)  # an exception could be caught by what is being imported
