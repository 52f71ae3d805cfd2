"""Runs on the node, seeing its processes: kills those of the pod with this uid, or the oldest child of its first."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path


def main(uid: str, part: str) -> None:
    names = (uid, uid.replace("-", "_"))
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    """In the system's ticks: numbers of processes begin anew at some time."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_pod = any(name in (process / "cgroup").read_text() for name in names)
            # The sandbox stays: it is no process of the program.
            if of_pod and (process / "comm").read_text().strip() != "pause":
                found = re.search(r"^PPid:\s+(\d+)$", (process / "status").read_text(), re.MULTILINE)
                number = int(process.name)
                started[number] = int((process / "stat").read_text().rpartition(")")[2].split()[19])
                parents[number] = int(found[1]) if found else 0
    firsts = [number for number, parent in parents.items() if parent not in parents]
    children = sorted((number for number, parent in parents.items() if parent in firsts), key=started.__getitem__)
    victims = children[:1] if part == "child" else list(parents)
    for number in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    sys.exit(0 if victims else f"no process of pod {uid} on this node")


if __name__ == "__main__":
    main(*sys.argv[1:])
