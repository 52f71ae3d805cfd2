"""Threads are as many as cores that a process has for itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pagefleet_engine.cores import CoreShare, allowed_cores, share_cores, usable_cores


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
