"""The process behind `pagefleet up`: signals, terminal, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pagefleet_download.bring import FleetDownload, caches_of
from rich.console import Console

from pagefleet_operator.local.fleet import Fleet
from pagefleet_operator.local.named import FleetSource
from pagefleet_operator.local.reporter import LiveReporter, PlainReporter, Reporter
from pagefleet_operator.local.settings import Commands, LocalSettings
from pagefleet_operator.local.state_dir import StateDir, state_home, sweep


def up(*, source: FleetSource, host: str, port: int, state_dir: Path | None, environment: Mapping[str, str]) -> int:
    """Run `pagefleet up`. Returns its exit status.

    Raises:
        OperatorError: it cannot start.
    """
    sweep(state_home(environment))
    state_dir = state_dir or source.state_dir
    caches = caches_of(environment)
    bring = FleetDownload(caches.hub)
    settings = LocalSettings(
        manifest=source.manifest if source.document is None else state_dir / source.manifest.name,
        document=source.document,
        state_dir=state_dir,
        models_dir=caches.models,
        download=bring,
        look=bring.look,
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
            if settings.document is not None:
                settings.manifest.write_text(settings.document)
                reporter.say(f"{settings.manifest}: edits of this file count while it runs")
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
