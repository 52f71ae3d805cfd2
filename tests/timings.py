"""What a run of tests cost, by room and by test. A pytest plug-in: `--timings` prints it.

Rooms run side by side, so wall time adds up to more than the run took. CPU time counts the processes that a test
started and waited for.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

import pytest

SLOWEST = 20
ALONE = "A test that fails here and passes alone is broken too: it needs time, or what another test left. Mend it."


@dataclass
class Cost:
    """What tests took together, in seconds."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, cpu_s: float, wall_s: float, *, is_test: bool) -> None:
        self.tests += is_test
        self.cpu_s += cpu_s
        self.wall_s += wall_s

    def __str__(self) -> str:
        return f"{self.cpu_s:8.1f} {self.wall_s:8.1f} {self.tests:6}"


def cpu_seconds() -> float:
    """Return what this process and its children that ended have computed."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclass(eq=False)
class Meter:
    """Writes into each report what it cost, in the process that runs the test: threads and fixtures included."""

    cpu_s: float = field(default_factory=cpu_seconds)
    wall_s: float = field(default_factory=time.monotonic)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        cpu_s, wall_s = cpu_seconds(), time.monotonic()
        report.user_properties += [("cpu_s", cpu_s - self.cpu_s), ("wall_s", wall_s - self.wall_s)]
        self.cpu_s, self.wall_s = cpu_s, wall_s
        return report


class Timings:
    """Adds up the reports of all processes, and prints sums."""

    def __init__(self) -> None:
        self.rooms: defaultdict[str, Cost] = defaultdict(Cost)
        self.tests: defaultdict[str, Cost] = defaultdict(Cost)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        room = "/".join(PurePath(report.nodeid.partition("::")[0]).parent.parts[:3])
        told = dict(report.user_properties)
        cpu_s, wall_s = told.get("cpu_s"), told.get("wall_s")
        if isinstance(cpu_s, float) and isinstance(wall_s, float):
            for total in (self.rooms[room], self.tests[report.nodeid]):
                total.add(cpu_s, wall_s, is_test=report.when == "call")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of CPU, of wall time, tests")
        for line in self._lines():
            terminalreporter.line(line)

    def _lines(self) -> Iterator[str]:
        for costs in (self.rooms, dict(self._slowest())):
            yield from (f"{cost} {name}" for name, cost in sorted(costs.items(), key=lambda item: -item[1].wall_s))
            yield ""
        total = Cost()
        for cost in self.rooms.values():
            total.add(cost.cpu_s, cost.wall_s, is_test=False)
            total.tests += cost.tests
        yield f"{total} in all"

    def _slowest(self) -> list[tuple[str, Cost]]:
        return sorted(self.tests.items(), key=lambda item: -item[1].wall_s)[:SLOWEST]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", action="store_true", help="print time by room, and the slowest tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter())
    if config.getoption("--timings") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.line(ALONE)
