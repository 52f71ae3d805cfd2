"""How a process ended, in words that logs and statuses share."""

from __future__ import annotations

import subprocess


def how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    """Say in words how a process ended whose end was seen; None was never started."""
    if process is None:
        return "was never started"
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "closed its side"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
