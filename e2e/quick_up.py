"""`pagefleet up` with an autoscaler that needs seconds where people's has minutes. No test in here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagefleet_operator.autoscale.policy import Tempo
from pagefleet_operator.local.reporter import PlainReporter
from pagefleet_operator.local.settings import Commands, LocalSettings, Timing
from pagefleet_operator.local.up import run_fleet

TEMPO = Tempo(
    up_window=1.0, one_up_window=1.0, down_window=5.0, one_down_window=5.0, first_down=5.0, down_pause=1.0,
    down_after_up=600.0, one_down_after_up=600.0, panic_window=1.0, panic_lasts=1.0, start_up=5.0,
)  # fmt: skip
"""Engines do not start in seconds, least of all beside other tests: none goes while others start, but for want of work.
"""


def main() -> int:
    """Take the flags of `pagefleet up` that tests give."""
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--state-dir", type=Path)
    given = parser.parse_args()
    settings = LocalSettings(
        manifest=given.manifest,
        state_dir=given.state_dir,
        models_dir=given.state_dir / "models",
        commands=Commands.installed(),
        port=given.port,
        timing=Timing(scaling_period=0.5, tempo=TEMPO),
    )
    return run_fleet(settings, lambda: PlainReporter(sys.stdout))


if __name__ == "__main__":
    sys.exit(main())
