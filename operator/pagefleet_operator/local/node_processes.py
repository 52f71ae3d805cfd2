"""An engine that is a process for each of its nodes: they are started, and end, together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pagefleet_operator.local.log_files import ProcessLog
from pagefleet_operator.local.process import Child, Launch
from pagefleet_operator.plan.exit_reasons import telling_line

_LEADER_TELLS_S = 10.0
"""After another node has ended, the one that serves ends too, and says which: it knows within this time."""
NodeLog = Callable[[int], ProcessLog]
"""The log of a node, by its number."""


class NodeProcesses:
    """As one child process: its id, its end and its signals are those of node 0, which serves."""

    def __init__(self, leader: Child, log: ProcessLog, others: Sequence[tuple[Child, ProcessLog]]) -> None:
        self._leader = leader
        self._log = log
        self._others = tuple(others)
        self._told = False
        self.pid = leader.pid

    @classmethod
    async def start(cls, launch: Launch, log: ProcessLog, log_of: NodeLog) -> NodeProcesses:
        """Start all of them.

        Raises:
            OSError: the program cannot be run.
        """
        leader = await Child.start(launch, log)
        others: list[tuple[Child, ProcessLog]] = []
        try:
            for node, each in enumerate(launch.followers, start=1):
                own = log_of(node)
                others.append((await Child.start(each, own), own))
        except OSError:
            for child in (leader, *(child for child, _ in others)):
                child.kill()
            raise
        return cls(leader, log, others)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all nodes, in their order."""
        return (self.pid, *(child.pid for child, _ in self._others))

    async def wait(self) -> int:
        """Wait until one has ended, and all are gone. Returns the exit status of the one that is to blame."""
        leader = asyncio.create_task(self._leader.wait())
        others = [asyncio.create_task(child.wait()) for child, _ in self._others]
        await asyncio.wait({leader, *others}, return_when=asyncio.FIRST_COMPLETED)
        first = next((node for node, ended in enumerate(others) if ended.done()), None)
        if self._told:
            await asyncio.wait({leader})
        if not leader.done() and first is not None:
            await asyncio.wait({leader}, timeout=_LEADER_TELLS_S)
            if not leader.done():
                self._blame(first)
                self.kill()
                await asyncio.wait({leader, *others})
                return others[first].result()
        self.kill()
        await asyncio.wait({leader, *others})
        return leader.result()

    def terminate(self) -> None:
        """Ask them to finish and end: those that follow go when the one that serves has."""
        self._told = True
        for child in (self._leader, *(child for child, _ in self._others)):
            child.terminate()

    def kill(self) -> None:
        for child in (self._leader, *(child for child, _ in self._others)):
            child.kill()

    def _blame(self, place: int) -> None:
        """Let the log end with the last words of another node."""
        words = telling_line(self._others[place][1].last_lines)
        self._log.last_lines.append(f"node {place + 1}: {words or 'it ended'}")
