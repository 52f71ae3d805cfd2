"""A process that watches its parent ends with its own status while the parent lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHES = {
    "core": "from pagefleet_engine.engine_core.process import _end_with_parent as watch",
    "rank": "from pagefleet_engine.executor.rank_process import _end_with_parent as watch",
}


@pytest.mark.parametrize("whose", WATCHES)
def test_it_gives_up_with_its_own_status(whose: str) -> None:
    """Python aborts at its end where another thread has a lock of its standard input."""
    script = f"""
import sys, threading, time
from pathlib import Path
{WATCHES[whose]}
threading.Thread(target=watch, args={"(Path('x'),)" if whose == "core" else "()"}, daemon=True).start()
time.sleep(0.1)
sys.exit(3)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(30) == 3
