"""An engine that is killed in the middle of streams for certain: none ends while a test looks at where it is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Protocol

from e2e.fleet_process import PATIENCE_S, FleetProcess
from tests.fakes.fleet_processes import all_gone

BEGUN = 60
"""Characters that a stream has shown when its engine may be killed."""
QUIET_S = 1.0


class Stream(Protocol):
    """One stream, as far as it was read."""

    @property
    def kind(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def ends(self) -> Sequence[str]: ...


async def until_begun(stream: Stream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(stream.text) < BEGUN:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


async def _until_quiet(streams: Sequence[Stream]) -> None:
    """Wait until all that frozen engines wrote before has been read."""
    before = -1
    while before < (read := sum(len(one.text) + len(one.ends) for one in streams)):
        before = read
        await asyncio.sleep(QUIET_S)


async def kill_midway(fleet: FleetProcess, streams: Sequence[Stream], kinds: Iterable[str]) -> bool:
    """Kill an engine that is in the middle of a stream of each of these kinds; returns whether there is one.

    There may be none: a reader that had no turn for a while finds its stream written to the end.
    """
    with fleet.frozen(*(one.id for one in fleet.endpoints())):
        await _until_quiet(streams)
        found: dict[str, set[str]] = {}
        for one in streams:
            if one.text and not one.ends:
                found.setdefault(one.engine, set()).add(one.kind)
        victim = next((engine for engine, its in found.items() if its >= set(kinds)), None)
        if victim is None:
            return False
        server, core = fleet.pids()[victim], fleet.core_pid(victim)
        os.kill(server, signal.SIGKILL)
    assert await asyncio.to_thread(all_gone, [server, core])
    return True
