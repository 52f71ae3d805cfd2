"""The process behind `pagefleet up`: signals, terminal, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from pagefleet_operator.local.fleet import Fleet
from pagefleet_operator.local.reporter import LiveReporter, PlainReporter, Reporter
from pagefleet_operator.local.settings import Commands, LocalSettings, default_models_dir
from pagefleet_operator.local.state_dir import StateDir, default_state_dir, state_home, sweep


def up(*, manifest: Path, host: str, port: int, state_dir: Path | None, environment: Mapping[str, str]) -> int:
    """Run `pagefleet up`. Returns its exit status.

    Raises:
        OperatorError: it cannot start.
    """
    sweep(state_home(environment))
    settings = LocalSettings(
        manifest=manifest,
        state_dir=state_dir or default_state_dir(manifest, environment),
        models_dir=default_models_dir(environment),
        commands=Commands.installed(),
        host=host,
        port=port,
    )
    return run_fleet(settings, _reporter)


def run_fleet(settings: LocalSettings, make_reporter: Callable[[], Reporter]) -> int:
    """Run a fleet in this process until a signal stops it. Returns the exit status.

    Raises:
        OperatorError: it cannot start.
    """
    with StateDir(settings.state_dir) as state:
        leftovers = state.end_leftovers()
        reporter = make_reporter()
        try:
            if leftovers:
                reporter.say(f"ended what an earlier run had left: {', '.join(leftovers)}")
            return asyncio.run(_run(settings, state, reporter))
        finally:
            reporter.close()


async def _run(settings: LocalSettings, state: StateDir, reporter: Reporter) -> int:
    fleet = Fleet(settings, state, reporter)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, fleet.stop)
    return await fleet.run()


def _reporter() -> Reporter:
    console = Console()
    return LiveReporter(console) if console.is_terminal else PlainReporter(sys.stdout)
