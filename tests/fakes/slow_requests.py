"""Requests whose steps take a while, so that none ends while a test looks at it: `Slow` of `tests/engine/plugin`."""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "engine" / "plugin"
SLOW = "--logits-processors=slow"
"""Of a server that takes them."""


def finding_plugin() -> dict[str, str]:
    """Return the environment of a process that finds it."""
    return {**os.environ, "PYTHONPATH": str(PLUGIN)}


def slow(until: Path | None = None) -> dict[str, str]:
    """Return the arguments of such a request, which takes no longer than others once the file `until` is there."""
    return {"slow_until": str(until or "/nowhere/at/all")}
