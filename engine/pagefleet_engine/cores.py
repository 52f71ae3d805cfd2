"""Which cores of its machine this process computes with, and which of them each of its ranks gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_BOUND_BY = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


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


@contextlib.contextmanager
def binding_threads(num_threads: int) -> Iterator[None]:
    """Have OpenMP, which torch loads within, bind each thread of its team to a core: two of them that share one for a
    moment keep all others waiting.

    Only where it has a thread for every core: of fewer the system knows best which cores are free. Whoever set one of
    OpenMP's own variables for this (specification 5.2, section 21.2) has decided it.
    """
    allowed = allowed_cores()
    first_of_cores = list({_threads_of_core(_CPUS, cpu): cpu for cpu in reversed(allowed)}.values())[::-1]
    if num_threads != len(first_of_cores) or any(name in os.environ for name in _BOUND_BY):
        yield
        return
    places = ",".join(f"{{{cpu}}}" for cpu in first_of_cores)
    os.environ.update(OMP_PROC_BIND="close", OMP_PLACES=places)
    try:
        yield
    finally:
        # Loading it bound this thread, whose place threads of other kinds and child processes would inherit.
        del os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"]
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def kept_on(cpu: int) -> Iterator[None]:
    """Keep this thread on a CPU; a negative one: wherever the system has it."""
    if cpu < 0:
        yield
        return
    with _same_cpus_after():
        with contextlib.suppress(OSError):  # it may have been taken from this process since
            os.sched_setaffinity(0, (cpu,))
        yield


def staying_free(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Do some work in a thread of a pool. Where OpenMP binds threads it puts each that first divides work on its first
    place, and all of them would stay there."""
    with _same_cpus_after():
        return work(*args, **kwargs)


@contextlib.contextmanager
def _same_cpus_after() -> Iterator[None]:
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


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
