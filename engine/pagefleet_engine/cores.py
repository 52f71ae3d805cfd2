"""Which cores of its machine this process computes with, and which of them each of its ranks gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def allowed_cores(cpus: Path = _CPUS) -> list[int]:
    """Return the CPUs that this process may use, by socket and core: threads of one core stand side by side."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (*_place(cpus, cpu), cpu))


def usable_cores(cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Return how many cores this process may use: two threads of a core that multiply only wait for each other, and a
    container with a limit of so many is stopped for the rest of each tenth of a second once it has used them up."""
    allowed = allowed_cores(cpus)
    count = len({_threads_of_core(cpus, cpu) for cpu in allowed})
    limit = _container_limit(cgroup)
    return count if limit is None else max(1, min(count, int(limit)))


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one rank computes with."""

    cores: Sequence[int]
    """None where ranks do not get one each: then they use the same."""
    num_threads: int
    """The same for all ranks: torch divides sums by it, and ranks must come to the same bits."""


def share_cores(size: int, allowed: Sequence[int], num_threads: int) -> list[CoreShare]:
    """Divide the CPUs `allowed`, neighbours next to each other, among `size` ranks.

    `num_threads`: of all ranks together.
    """
    each, threads = len(allowed) // size, max(1, num_threads // size)
    return [CoreShare(allowed[rank * each : (rank + 1) * each], threads) for rank in range(size)]


def _place(cpus: Path, cpu: int) -> tuple[int, int]:
    """Socket and core, whose numbers begin again in each cluster; 0 and the CPU where they are hidden."""
    try:
        topology = cpus / f"cpu{cpu}" / "topology"
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


def _threads_of_core(cpus: Path, cpu: int) -> str:
    """The CPUs that are threads of the same core, as Linux lists them; itself where a container does not show them."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _container_limit(cgroup: Path) -> float | None:
    """The CPUs that a container may use up, from its control group (version 2 or 1); None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        spent = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if spent < 0 else spent / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    return None
