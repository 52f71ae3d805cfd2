"""Plain logging: one line per record on standard error, control characters escaped, never a request's text."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    r"""`2026-11-21 11:15:13 INFO router: text`. What a client sent cannot forge a second line: `\n` is shown."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s router: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the standard library's name
        """Format the line; a traceback, which is ours, follows it on lines of its own."""
        return escape_control(super().formatMessage(record))


def escape_control(text: str) -> str:
    r"""Return `text` with control characters, line and paragraph separators written as `\x1b` or `\u2028`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def set_up_logging() -> None:
    """Send the package's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("pagefleet_router")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def tell_of_a_crash(task: asyncio.Task[None], what: str, then: Callable[[], None] | None = None) -> None:
    """Log with `what` it means that a task failed, and call `then`, when it does; a cancelled one has not."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s", what, exc_info=error)
            if then is not None:
                then()

    task.add_done_callback(ended)
