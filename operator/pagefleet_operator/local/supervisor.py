"""Keeps one instance running: starts it, asks how it is, starts it again, and lets it finish when it has to go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagefleet_protocol.exit_status import MISTAKE, MODEL_NOT_LOADED
from pagefleet_protocol.kube_names import rank_id
from pagefleet_protocol.load_progress import LoadProgress

from pagefleet_operator.errors import OperatorError
from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.local.launcher import Launcher
from pagefleet_operator.local.log_files import ProcessLog, without_stamp
from pagefleet_operator.local.node_processes import NodeProcesses
from pagefleet_operator.local.probe import probe, probe_loading
from pagefleet_operator.local.process import Launch, exit_text
from pagefleet_operator.local.reporter import Reporter
from pagefleet_operator.local.settings import LocalSettings, Timing
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_operator.local.table import ProcessView
from pagefleet_operator.plan.exit_reasons import telling_line
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.workloads import Workload

_HOPELESS = (MISTAKE, MODEL_NOT_LOADED)
"""Exit statuses of mistakes, which somebody has to correct first."""


@dataclass(frozen=True, slots=True)
class World:
    """What supervisors share."""

    settings: LocalSettings
    environment: Mapping[str, str]
    """Our own."""
    launcher: Launcher
    state: StateDir
    reporter: Reporter
    changed: Callable[[], None]
    """Called whenever an observation may differ from the last one."""
    jitter: Callable[[], float]

    @property
    def timing(self) -> Timing:
        return self.settings.timing


class Supervisor:
    """One instance of a workload; `run` returns when it has been drained."""

    def __init__(self, service: str, workload: Workload, number: int, world: World) -> None:
        self.name = f"{workload.name}-{number}"
        self.number = number
        self.url: str | None = None
        """Where its process answers probes, while there is one that was ready."""
        self.address: str | None = None
        """Where its process answers them or is going to, while there is one."""
        self.endpoints: tuple[str, ...] = ()
        """Where its process takes requests or is going to: one URL, or one for each of its data ranks."""
        self.kv_addresses: tuple[str, ...] = ()
        """HOST:PORT where its process answers decode engines; none where it does not."""
        self.start_up_s: float | None = None
        """What it took to be ready when it last started; None: it never was."""
        self._service = service
        self._workload = workload
        self._world = world
        self._log = ProcessLog(world.state.logs, self.name, self._on_line)
        self._backoff = Backoff(world.timing.backoff_first, world.timing.backoff_most, world.jitter)
        self._state = State.STARTING
        self._detail = ""
        self._restarts = 0
        self._served = False
        self._routed = False
        self._leave = asyncio.Event()
        self._now = asyncio.Event()
        self._child: NodeProcesses | None = None
        self._is_hopeless = False
        self._began = 0.0
        self._loading: LoadProgress | None = None

    @property
    def process(self) -> ProcessView | None:
        """Its process, while there is one."""
        return ProcessView(self._child.pid, self._began, self._loading) if self._child else None

    @property
    def endpoint_urls(self) -> dict[str, str]:
        """Where requests go, by the name that routers have for it; pods of several data ranks are called so too."""
        return {rank_id(self.name, rank): url for rank, url in enumerate(self.endpoints)}

    @property
    def pid(self) -> int | None:
        """Id of its process, while there is one."""
        return self._child.pid if self._child else None

    def observe(self) -> Instance:
        detail = self._detail
        if self._state is State.STARTING and self._log.last_line:
            detail = without_stamp(self._log.last_line)[:300]
        if self._state is State.STARTING and self._loading is not None:
            detail = self._loading.describe()
        return Instance(self.number, self._workload.revision, self._state, self._served, self._restarts, detail)

    def drain(self, *, routed: bool = True) -> None:
        """Take it out of traffic, let it finish, end it. Returns at once.

        `routed`: routers may still send to it, and get time to learn that they must not.
        """
        self._routed = routed
        if not self._leave.is_set():
            self._leave.set()
            self._enter(State.DRAINING, "finishes what it has")

    def kill(self) -> None:
        self._now.set()
        self.drain(routed=False)

    async def run(self) -> None:
        try:
            while not self._leave.is_set():
                reason = await self._attempt()
                if not self._leave.is_set():
                    await (self._give_up(reason) if self._is_hopeless else self._pause_after(reason))
        finally:
            self._world.launcher.release(self.name)
            if self._workload.kv_disk:
                await asyncio.to_thread(self._world.state.remove_kv, self.name)
            self._world.changed()

    async def _attempt(self) -> str:
        """Run one process to its end. Returns why it ended."""
        self._log.last_lines.clear()
        try:
            launch = self._world.launcher.launch(self._service, self._workload, self.number)
        except OperatorError as error:
            return str(error)
        try:
            child = await NodeProcesses.start(launch, self._log, self._node_log)
        except OSError as error:
            return f"{launch.argv[0]} cannot be started: {error.strerror}"
        self._child, self.address = child, launch.url
        self.endpoints, self.kv_addresses = launch.endpoints or (launch.url,), launch.kv_addresses
        self._began, self._loading = time.monotonic(), None
        for node, pid in enumerate(child.pids):
            self._world.state.record(self._node_name(node), pid)
        if not self._leave.is_set():
            self._enter(State.STARTING, f"process {child.pid}")
        exited = asyncio.create_task(child.wait())
        try:
            return await self._accompany(child, exited, launch)
        finally:
            self.url = self.address = self._child = None
            self.endpoints = self.kv_addresses = ()
            if not exited.done():
                child.kill()
                exited.cancel()
            for node in range(len(child.pids)):
                self._world.state.forget(self._node_name(node))

    def _node_name(self, node: int) -> str:
        """Return what a process is called, as a pod would be."""
        return f"{self.name}-{node}" if node else self.name

    def _node_log(self, node: int) -> ProcessLog:
        name = self._node_name(node)
        return ProcessLog(self._world.state.logs, name, lambda line: self._world.reporter.log(name, line))

    async def _accompany(self, child: NodeProcesses, exited: asyncio.Task[int], launch: Launch) -> str:
        watched = asyncio.create_task(self._watch(launch.url))
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({exited, watched, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                # What has served before may serve again: a disk that is away for a moment comes back.
                self._is_hopeless = exited.result() in _HOPELESS and not self._served
                return self._last_words(exited.result())
            if leaving.done():
                watched.cancel()
                await self._finish(child, exited)
                return ""
            child.kill()
            await exited
            return watched.result()
        finally:
            watched.cancel()
            leaving.cancel()

    async def _watch(self, url: str) -> str:
        """Follow the probes. Returns why the process has to be ended."""
        timing, paths = self._world.timing, self._workload.probes
        longest = min(timing.startup, self._workload.progress_s)
        began = time.monotonic()
        ready_since: float | None = None
        num_unready = num_dead = 0
        while True:
            elapsed = time.monotonic() - began
            # Eager at first, patient with what takes long.
            eager = timing.starting_probe_period + elapsed / 20 if ready_since is None else timing.probe_period
            await asyncio.sleep(min(eager, timing.probe_period))
            problem, loading = await probe_loading(url + paths.ready, timing.probe_timeout)
            self._note_loading(loading)
            if problem is None:
                # What may get traffic lives: no second question.
                num_unready = num_dead = 0
                if self._state is not State.READY:
                    self._enter(State.READY, "again" if ready_since else f"after {time.monotonic() - began:.1f} s")
                    self.url = url
                    self._served = True
                    if ready_since is None:
                        self.start_up_s = time.monotonic() - began
                    ready_since = ready_since or time.monotonic()
                elif ready_since and time.monotonic() - ready_since > timing.stable:
                    self._backoff.reset()
                continue
            num_unready += 1
            if self._state is State.READY and num_unready >= timing.ready_failures:
                self._enter(State.NOT_READY, problem)
            if ready_since is None:
                # A router waits for engines as long as it has to.
                if elapsed > longest and self._workload.role != "router":
                    return f"not ready after {longest:g} s: {problem}"
                continue
            dead = await probe(url + paths.live, timing.probe_timeout)
            num_dead = 0 if dead is None else num_dead + 1
            if num_dead >= timing.live_failures:
                return f"does not live any more: {dead}"

    def _note_loading(self, loading: LoadProgress | None) -> None:
        if loading != self._loading:
            self._loading = loading
            self._world.changed()

    async def _finish(self, child: NodeProcesses, exited: asyncio.Task[int]) -> None:
        """End a process so that no request is lost, unless there is no time for it."""
        timing = self._world.timing
        if self._routed and self.url:
            await self._unless_killed(exited, timing.settle)
        child.terminate()
        await self._unless_killed(exited, self._workload.drain_timeout_s + timing.kill_grace)
        if not exited.done():
            if not self._now.is_set():
                self._world.reporter.say(f"{self.name}: did not end by itself, killed")
            child.kill()
            await exited

    async def _unless_killed(self, exited: asyncio.Task[int], seconds: float) -> None:
        """Wait until the process has ended, time is up, or `kill` was called."""
        killed = asyncio.create_task(self._now.wait())
        await asyncio.wait({exited, killed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()

    async def _give_up(self, reason: str) -> None:
        """Wait until it is replaced: to start it again would end in the same way."""
        self._enter(State.FAILED, reason)
        again = "it is started again when its service is edited, or with the next pagefleet up"
        self._world.reporter.say(f"{self.name}: correct it; {again} (log: {self._log.path})")
        await self._leave.wait()

    async def _pause_after(self, reason: str) -> None:
        self._restarts += 1
        pause = self._backoff.next_pause()
        self._enter(State.FAILED, reason)
        self._world.reporter.say(f"{self.name}: starts again in {pause:.1f} s (log: {self._log.path})")
        leaving = asyncio.create_task(self._leave.wait())
        await asyncio.wait({leaving}, timeout=pause)
        leaving.cancel()

    def _last_words(self, status: int) -> str:
        words = without_stamp(telling_line(self._log.last_lines))[:300]
        if not words:
            return exit_text(status)
        # A process that was killed had no time to say why.
        return f"{words} ({exit_text(status)})" if status >= 0 else f"{exit_text(status)}; its last line: {words}"

    def _enter(self, state: State, detail: str) -> None:
        if self._leave.is_set() and state is not State.DRAINING:
            return  # a probe that was under way must not bring it back
        if (state, detail) != (self._state, self._detail):
            self._world.reporter.say(f"{self.name}: {state.value}, {detail}")
        self._state, self._detail = state, detail
        self._world.changed()

    def _on_line(self, line: str) -> None:
        self._world.reporter.log(self.name, line)
        if self._state is State.STARTING:
            self._world.changed()
