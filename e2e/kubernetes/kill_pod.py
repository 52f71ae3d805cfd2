"""Runs on the node, seeing its processes: kills those of the pod with this uid."""

import contextlib
import os
import signal
import sys
from pathlib import Path


def main(uid: str) -> None:
    names = (uid, uid.replace("-", "_"))
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_pod = any(name in (process / "cgroup").read_text() for name in names)
            # The sandbox stays: it is no process of the program.
            if of_pod and (process / "comm").read_text().strip() != "pause":
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
    sys.exit(0 if killed else f"no process of pod {uid} on this node")


if __name__ == "__main__":
    main(sys.argv[1])
