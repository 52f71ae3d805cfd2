"""Which cores of a machine each of its ranks gets: as many for each, and those that share a core together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one rank computes with."""

    cores: Sequence[int]
    """None where ranks do not get one each: then they use the same."""
    num_threads: int
    """The same for all ranks: torch divides sums by it, and ranks must come to the same bits."""


def share_cores(size: int, allowed: Sequence[int], num_threads: int | None) -> list[CoreShare]:
    """Divide the cores `allowed`, neighbours next to each other, among `size` ranks.

    `num_threads`: of all ranks together; None: one per core.
    """
    each = len(allowed) // size
    threads = max(1, each if num_threads is None else num_threads // size)
    return [CoreShare(allowed[rank * each : (rank + 1) * each], threads) for rank in range(size)]


def allowed_cores() -> list[int]:
    """Return the cores that this process may use, by socket and core: threads of one core stand side by side."""
    return sorted(
        os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


def _topology(cpu: int, name: str) -> int:
    try:
        return int((_CPUS / f"cpu{cpu}" / "topology" / name).read_text())
    except (OSError, ValueError):  # no such file in this container: one core is like another
        return 0
