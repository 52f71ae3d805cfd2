"""Writes the figures of the scripts beside it, in the form of `pagefleet bench`: with machine, commit and command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet_engine.bench.report import Report

ROOT = Path(__file__).resolve().parent.parent


def write_report(path: str | Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write a report as JSON; `figures` has units in its keys."""
    command = ("python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:])
    Report(name=name, command=command, figures=figures).write(path)
