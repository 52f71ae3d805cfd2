"""Plain logging: one line per record on standard error, control characters escaped, never a request's text."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from pagefleet_protocol.printable import escape_control

LOG_LEVEL = "PAGEFLEET_LOG_LEVEL"
"""Variable of the level, for every program."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class LineFormatter(logging.Formatter):
    r"""`2026-11-21 11:15:13 INFO engine core: text`. What a client sent cannot forge a second line: `\n` is shown.

    `over_a_bar`: the line is a terminal's, and erases what a bar may have drawn there.
    """

    def __init__(self, process: str, over_a_bar: bool = False) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s", "%Y-%m-%d %H:%M:%S")
        self._before = "\x1b[K" if over_a_bar else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the standard library's name
        """Format the line; a traceback, which is ours, follows it on lines of its own."""
        return self._before + escape_control(super().formatMessage(record))


def can_erase(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that can erase what stands in a line."""
    return stream.isatty() and environment.get("TERM", "dumb") != "dumb"


def log_level(environment: Mapping[str, str]) -> str:
    """Return the level that the environment asks for; INFO where it says nothing.

    Raises:
        ValueError: there is no such level.
    """
    level = (environment.get(LOG_LEVEL) or "INFO").upper()
    if level not in LEVELS:
        raise ValueError(f"{LOG_LEVEL} is {level[:80]!r}: give one of {', '.join(LEVELS)}")
    return level


def set_up_logging(process: str, *packages: str) -> None:
    """Send the log to standard error, at the level that the environment asks for.

    Args:
        process: named in each line, e.g. `engine core`.
        packages: whose log, e.g. `pagefleet_engine`; none: of all that logs in this process.

    Raises:
        ValueError: there is no such level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process, can_erase(sys.stderr, os.environ)))
    for package in packages or ("",):
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(log_level(os.environ))
        logger.propagate = False
