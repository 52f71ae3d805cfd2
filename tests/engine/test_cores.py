"""Threads are as many as cores that a process has for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet_engine.cores import (
    CoreShare,
    allowed_cores,
    binding_threads,
    kept_on,
    share_cores,
    staying_free,
    usable_cores,
)

from tests.fakes.native_kernels import native_library


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of two cores with two threads each; CPUs 0 to 3 are the first threads, 4 to 7 the second."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def test_threads_of_a_core_stand_side_by_side_and_count_once(cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_cores(cpus) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert usable_cores(cpus, cpus) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert usable_cores(cpus, cpus) == 2
    assert usable_cores(cpus / "hidden", cpus) == 3


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 4), ("250000 100000", 2), ("20000 100000", 1), ("900000 100000", 4), ("", 4)]
)
def test_a_container_s_limit_counts(cpus: Path, limit: str, expected: int) -> None:
    (cpus / "cpu.max").write_text(limit)
    assert usable_cores(cpus, cpus) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("300000", 3)])
def test_so_does_one_of_the_first_version(cpus: Path, quota: str, expected: int) -> None:
    (cpus / "cpu").mkdir()
    (cpus / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (cpus / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(cpus, cpus) == expected


def test_cores_are_shared_evenly() -> None:
    assert share_cores(2, [0, 4, 1, 5], 4) == [CoreShare([0, 4], 2), CoreShare([1, 5], 2)]
    assert share_cores(2, [0, 4, 1, 5], 2) == [CoreShare([0, 4], 1), CoreShare([1, 5], 1)]
    assert share_cores(2, [0, 1, 2], 3) == [CoreShare([0], 1), CoreShare([1], 1)]
    assert share_cores(2, [0], 1) == [CoreShare([], 1), CoreShare([], 1)]


_BOUND = """
import os, sys
from pathlib import Path
from pagefleet_engine.cores import allowed_cores, binding_threads, kept_on, usable_cores
before = os.sched_getaffinity(0)
with binding_threads(int(sys.argv[1])):
    import torch
torch.set_num_threads(int(sys.argv[1]))
torch.ones(1 << 22).exp()
from pagefleet_kernels.native.library import load_library
own_cpu = load_library()[0].own_cpu()
teams = {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
assert os.sched_getaffinity(0) == before, "its own thread is left alone"
assert "OMP_PLACES" not in os.environ, "child processes are left alone"
with kept_on(own_cpu):
    print(own_cpu, sorted(os.sched_getaffinity(0)), sorted(map(sorted, teams - {frozenset(before)})))
"""


@pytest.mark.parametrize("cores", [2, 1])
def test_each_thread_of_a_team_gets_a_core_where_there_is_one_for_each(cores: int) -> None:
    native_library()
    cpus = allowed_cores()
    if len(cpus) < 2 or usable_cores() < 2:
        pytest.skip("one core has no team")
    done = subprocess.run(
        ["taskset", "-c", f"{cpus[0]},{cpus[-1]}", sys.executable, "-c", _BOUND, str(cores)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = sorted((cpus[0], cpus[-1]))
    free = f"-1 {sorted((first, last))} []"
    assert done.stdout.strip() == (f"{first} [{first}] [[{last}]]" if cores == 2 else free)


def test_who_sets_openmps_own_variables_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "threads")
    with binding_threads(usable_cores()):
        assert "OMP_PROC_BIND" not in os.environ
        assert os.environ["OMP_PLACES"] == "threads"


def test_work_leaves_its_thread_where_it_was_and_a_cpu_that_is_gone_ends_no_step() -> None:
    before = os.sched_getaffinity(0)
    assert staying_free(_narrowed, min(before)) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with kept_on(1023):
        assert os.sched_getaffinity(0) == before


def _narrowed(cpu: int) -> set[int]:
    os.sched_setaffinity(0, (cpu,))
    return os.sched_getaffinity(0)
