"""How our programs tell whoever started them why they ended; the last line on stderr says it in words.

0 is a clean end, and 1 whatever has no number of its own.
"""

from __future__ import annotations

import subprocess

MISTAKE = 2
"""A flag or a setting cannot work: starting it again does not help."""
MODEL_NOT_LOADED = 3
"""Of engines: the settings are right, and the model is missing, damaged, unknown or too large."""


def how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    """Say in words how a process ended whose end was seen; None was never started."""
    if process is None:
        return "was never started"
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "closed its side"
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
