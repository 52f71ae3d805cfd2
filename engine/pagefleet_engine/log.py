"""Plain logging: one line per record on standard error, control characters escaped, never a request's text."""

from __future__ import annotations

import logging
import os
import sys

from pagefleet_engine.errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_PACKAGES = ("pagefleet_engine", "pagefleet_kv")


class LineFormatter(logging.Formatter):
    r"""`2026-11-21 11:15:13 INFO engine core: text`. What a client sent cannot forge a second line: `\n` is shown."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the standard library's name
        """Format the line; a traceback, which is ours, follows it on lines of its own."""
        return escape_control(super().formatMessage(record))


def escape_control(text: str) -> str:
    r"""Return `text` with control characters, line and paragraph separators written as `\x1b` or `\u2028`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def set_up_logging(process: str, level: str | None = None) -> None:
    """Send the log of the engine and of its connectors to standard error.

    Args:
        process: named in each line, e.g. `engine core`.
        level: default: PAGEFLEET_LOG_LEVEL, else INFO.

    Raises:
        ConfigError: the level is unknown.
    """
    level = (level or os.environ.get("PAGEFLEET_LOG_LEVEL") or "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(f"PAGEFLEET_LOG_LEVEL is {level}: give one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
