"""What a `pagefleet up` has running, from its own records and the kernel's. No test in here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from pagefleet_operator.local.state_dir import start_time


def recorded_pids(state_dir: Path) -> dict[str, int]:
    """Return the process of each instance that the fleet has on record."""
    return {name: pid for name, (pid, _) in json.loads((state_dir / "processes.json").read_text()).items()}


def child_pids(pid: int) -> list[int]:
    """Return what a process's main thread started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def shared_memory() -> set[str]:
    """Return the names in /dev/shm, but for those of a browser: other tests may be starting one."""
    return {path.name for path in Path("/dev/shm").iterdir() if "hromium" not in path.name}


def all_gone(pids: Iterable[int], timeout_s: float = 300.0) -> bool:
    """Wait for processes to end; returns whether they did."""
    pids = list(pids)
    deadline = time.monotonic() + timeout_s
    while any(start_time(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(start_time(pid) for pid in pids)
