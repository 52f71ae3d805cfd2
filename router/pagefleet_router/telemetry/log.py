"""Tasks that nobody waits for say in the log that they failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


def tell_of_a_crash(task: asyncio.Task[None], what: str, then: Callable[[], None] | None = None) -> None:
    """Log with `what` it means that a task failed, and call `then`, when it does; a cancelled one has not."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s", what, exc_info=error)
            if then is not None:
                then()

    task.add_done_callback(ended)
