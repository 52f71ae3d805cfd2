"""The memory that ranks of one machine share, as whoever starts them makes it. Knows no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import msgspec

from pagefleet_engine.ranks.doorbell import Doorbell

SLOT_BYTES = 1 << 20
"""Of a piece of a larger tensor. Smaller ones cost more: ranks wait for each other at each piece."""
PAGE = 4096
"""Before the slots."""


class SharedHandles(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors of a group's memory, for processes that inherit them."""

    size: int
    memory: int
    bells: tuple[Sequence[int], Sequence[int]]
    """Per set of slots, one of each rank."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (self.memory, *self.bells[0], *self.bells[1])


@contextlib.contextmanager
def closed_on_failure() -> Iterator[list[int]]:
    """Give a list for new descriptors; where what follows fails, those in it are closed."""
    made: list[int] = []
    try:
        yield made
    except BaseException:
        for fd in made:
            os.close(fd)
        raise


def make_bells(count: int) -> list[int]:
    """Make doorbells; returns their descriptors.

    Raises:
        OSError: the system gives no more.
    """
    with closed_on_failure() as made:
        for _ in range(count):
            made.append(Doorbell().fd)
    return made


def make_shared_group(size: int) -> SharedHandles:
    """Make the memory of a group of `size` ranks; it has no name, so nothing is left of it.

    Raises:
        OSError: the system gives no memory, or no more descriptors.
    """
    with closed_on_failure() as made:
        made.append(memory := os.memfd_create("pagefleet-ranks"))
        os.ftruncate(memory, PAGE + 2 * size * SLOT_BYTES)
        bells = make_bells(2 * size)
    return SharedHandles(size, memory, (bells[:size], bells[size:]))
