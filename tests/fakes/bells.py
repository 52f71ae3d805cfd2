"""Waiting for bells. No test in here."""

from __future__ import annotations

import select
from collections.abc import Iterable


def rings(bells: Iterable[int], timeout_s: float) -> bool:
    """Whether one of them does within the time; bells are descriptors of any number, as a process of many tests has
    many open: `select.select` refuses those from 1024 on."""
    poll = select.poll()
    for bell in bells:
        poll.register(bell, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
