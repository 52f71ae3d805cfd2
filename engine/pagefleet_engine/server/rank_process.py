"""A data rank with a port of its own: `python -m pagefleet_engine.server.rank_process`, started by `rank_servers`.

Its standard input has a line of JSON, `RankStart`; when it closes, who started it is gone, and it drains as by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import IO

import msgspec

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.server.rank_servers import RankStart
from pagefleet_engine.server.serve import Parent, serve
from pagefleet_engine.settings import told_status


def _end_with_parent(lines: IO[bytes]) -> None:
    lines.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run the process to its end; returns the exit status."""
    # Ctrl-C in a terminal reaches all processes; who started this one passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = open(0, "rb", buffering=0)  # noqa: SIM115 - a buffer's lock would outlive the interpreter
    start = msgspec.json.decode(lines.readline(), type=RankStart)
    os.set_inheritable(start.sentinel, False)
    threading.Thread(target=_end_with_parent, args=(lines,), daemon=True).start()
    try:
        parent = Parent((signal.SIGTERM,), lambda: _tell(start.sentinel))
        return serve(start.config, start.server, parent)
    except ConfigError as error:
        return told_status(error)


def _tell(sentinel: int) -> None:
    os.write(sentinel, b"1")


if __name__ == "__main__":
    sys.exit(main())
