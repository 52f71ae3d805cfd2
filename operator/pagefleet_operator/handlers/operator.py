"""The operator and its process: it watches in every process, and reconciles in the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from pagefleet_protocol.settings.log import set_up_logging

from pagefleet_operator.apply.applier import Applier
from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.connection import Credentials, credentials_of, load_configuration
from pagefleet_operator.apply.kinds import CHILDREN, INFERENCE_PROFILE, INFERENCE_SERVICE, POD, children_present
from pagefleet_operator.apply.kube_cluster import KubeCluster, TokenBucket, connect
from pagefleet_operator.errors import ClusterError, Refused
from pagefleet_operator.handlers.announcer import Announcer
from pagefleet_operator.handlers.audit import Auditor, Scope
from pagefleet_operator.handlers.autoscaler import Autoscaler
from pagefleet_operator.handlers.cluster_view import ClusterView, Key
from pagefleet_operator.handlers.event_reader import EventReader
from pagefleet_operator.handlers.health import HealthServer, Vitals
from pagefleet_operator.handlers.lease import AlwaysLeads, Election, Leadership
from pagefleet_operator.handlers.live_numbers import LiveNumbers
from pagefleet_operator.handlers.metrics import Gauges, OperatorMetrics, TrialGauge
from pagefleet_operator.handlers.observer import Observer, Sources
from pagefleet_operator.handlers.pod_http import HttpPods, KvAnswers, PodHttp
from pagefleet_operator.handlers.reconciler import Reconciler, Tools
from pagefleet_operator.handlers.settings import OperateSettings
from pagefleet_operator.handlers.status_writer import StatusWriter
from pagefleet_operator.handlers.watches import Watches
from pagefleet_operator.handlers.work_queue import WorkQueue
from pagefleet_operator.render.drift import differences

_LOG = logging.getLogger(__name__)
_OPTIONAL = tuple(kind for kind in CHILDREN if kind.optional)
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What the operator meets, and a test replaces."""

    cluster: Cluster
    """Behind the fence of `election`."""
    election: Election
    pods: PodHttp
    credentials: Callable[[], Credentials]
    """For the watches."""
    metrics: OperatorMetrics
    clock: Callable[[], float] = time.monotonic
    """What the autoscaler measures time by."""


class Operator:
    """Everything wired together; `run` it once."""

    def __init__(self, settings: OperateSettings, outside: Outside) -> None:
        self._settings = settings
        self._cluster = outside.cluster
        self._election = outside.election
        self._metrics = outside.metrics
        self._view = ClusterView()
        self._live = LiveNumbers(outside.pods, self._view, _now)
        self._autoscaler = Autoscaler(
            outside.pods, self._view, outside.metrics.scaling_decided, outside.clock, settings.timing.scaling
        )
        self._reconciler = _reconciler(settings, outside, self._view, (self._live, self._autoscaler))
        self._queue = WorkQueue(
            self._reconciler.reconcile, outside.metrics, settings.timing.resync, settings.timing.pace
        )
        self._auditor = Auditor(outside.cluster, self._view)
        self._watches = Watches(self._view, outside.credentials, self._queue.add, settings.timing.watch)
        self._profiles_readable = True
        self._synced = asyncio.Event()
        self.port = 0
        """Where /livez, /readyz and /metrics are, once it runs."""

    async def run(self, stopping: asyncio.Event, started: Callable[[], None]) -> None:
        """Work until `stopping` is set. `started` is called whenever kopf has taken over signals.

        Raises:
            PortError: the port of the probes is taken.
        """
        health = HealthServer(self._vitals(), self._metrics.text)
        self._metrics.show(self._gauges())
        self.port = await health.start(self._settings.host, self._settings.port)
        try:
            await self._discover_at_last(stopping)
            async with asyncio.TaskGroup() as group:
                around = [
                    group.create_task(work)
                    for work in (
                        self._watches.run(self._scope, started),
                        self._sync(),
                        self._keep_discovering(),
                        self._keep_auditing(),
                    )
                ]
                await self._lead_and_follow(stopping)
                # At once, so that a standby need not wait for the watches of this process to end.
                await self._election.release()
                for task in around:
                    task.cancel()
        finally:
            await health.stop()

    async def _sync(self) -> None:
        await self._auditor.wait_until_seen(self._scope())
        self._queue.add(self._view.services())
        self._synced.set()
        _LOG.info("%d InferenceServices seen", sum(1 for _ in self._view.services()))

    async def _lead_and_follow(self, stopping: asyncio.Event) -> None:
        """Stand by until the lease is ours, reconcile while it is, and stand by again."""
        await first_of(self._synced.wait(), stopping.wait())
        while not stopping.is_set():
            await first_of(self._election.acquire(), stopping.wait())
            if self._election.leads and not stopping.is_set():
                _LOG.info("leading as %s", self._settings.identity)
                await self._lead(stopping)
                _LOG.info("leading no more")

    async def _lead(self, stopping: asyncio.Event) -> None:
        self._queue.start_over()
        self._autoscaler.start_over()
        self._queue.add(self._view.services())
        work = self._queue.work(self._settings.workers, stopping, self._settings.timing.finish)
        # Whichever ends first ends the others: when the lease is lost, reconciles are cancelled where they are.
        numbers = (self._live.run(self._queue.add), self._autoscaler.run(self._queue.add))
        await first_of(self._election.hold(), work, *numbers)

    async def _discover_at_last(self, stopping: asyncio.Event) -> None:
        pause_s = 1.0
        while not stopping.is_set():
            try:
                await self._discover()
            except ClusterError as error:
                _LOG.warning("the API server does not answer: %s; again in %.0f s", error, pause_s)
                await first_of(asyncio.sleep(pause_s), stopping.wait())
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            else:
                return

    async def _discover(self) -> bool:
        """Ask which optional kinds there are; returns whether that changed what is watched."""
        before = (self._reconciler.optional_kinds, self._profiles_readable)
        found = await self._cluster.kinds_present(_OPTIONAL)
        self._profiles_readable = await self._may_list_profiles()
        self._reconciler.optional_kinds = found
        return before != (found, self._profiles_readable)

    async def _may_list_profiles(self) -> bool:
        try:
            async for _ in self._cluster.list_metadata(INFERENCE_PROFILE, "", ""):
                break
        except Refused as error:
            if self._profiles_readable:
                _LOG.warning("InferenceProfiles cannot be listed, so there are none: %s", error)
            return False
        return True

    async def _keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(self._settings.timing.discovery)
            with _logged("asking for optional kinds"):
                if await self._discover():
                    _LOG.info("optional kinds: %s", ", ".join(sorted(self._reconciler.optional_kinds)) or "none")
                    self._watches.restart()
                    self._queue.add(self._view.services())

    async def _keep_auditing(self) -> None:
        timing = self._settings.timing
        while True:
            lag_s = self._auditor.longest_lag_s()
            await asyncio.sleep(timing.audit_behind if lag_s else timing.resync)
            with _logged("comparing with the watches"):
                await self._auditor.audit(self._scope(), self._queue.add)
                if self._auditor.longest_lag_s() > timing.watch_restart:
                    _LOG.warning("a watch is silent; starting all of them again")
                    self._watches.restart()

    def _scope(self) -> Scope:
        profiles = (INFERENCE_PROFILE,) if self._profiles_readable else ()
        children = children_present(self._reconciler.optional_kinds)
        return Scope((INFERENCE_SERVICE, *profiles, *children, POD), self._settings.namespaces)

    def _leads(self) -> bool:
        return self._election.leads

    def _vitals(self) -> Vitals:
        return Vitals(
            leads=self._leads,
            synced=self._synced.is_set,
            stalled_s=lambda: self._queue.stalled_s,
            longest_work_s=lambda: self._queue.longest_work_s,
            cluster_answers=self._metrics.cluster_answers,
            watch_lag_s=self._auditor.longest_lag_s,
        )

    def _gauges(self) -> Gauges:
        return Gauges(
            leads=self._leads,
            queue_depth=lambda: self._queue.depth,
            oldest_key_s=lambda: self._queue.longest_wait_s,
            watch_lag_s=self._auditor.longest_lag_s,
            watch_restarts=lambda: self._watches.restarts,
            readiness=self._readiness,
            scaling=self._autoscaler.gauges,
            trials=self._trials,
        )

    def _readiness(self) -> Iterator[tuple[str, str]]:
        for _, status in self._statuses():
            yield _ready_condition(status)

    def _trials(self) -> Iterator[TrialGauge]:
        for key, status in self._statuses():
            trial = status.get("canary") or {}
            phase = str(trial.get("phase", ""))
            if phase in ("Starting", "Analysing", "RolledBack"):
                yield TrialGauge(key, phase, int(trial.get("percent", 0)))

    def _statuses(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        for key in self._view.services():
            stored = self._view.service(key)
            if stored is not None:
                yield key, msgspec.json.decode(stored.status)


def _reconciler(
    settings: OperateSettings, outside: Outside, view: ClusterView, numbers: tuple[LiveNumbers, Autoscaler]
) -> Reconciler:
    cluster = outside.cluster
    sources = Sources(
        view=view,
        cluster=cluster,
        events=EventReader(cluster),
        pods=outside.pods,
        kv=KvAnswers(outside.pods),
        live=numbers[0],
        scaling=numbers[1],
        now=_now,
    )
    return Reconciler(
        Tools(
            view=view,
            cluster=cluster,
            observer=Observer(sources),
            settings=settings.cluster,
            applier=Applier(cluster, differences),
            statuses=StatusWriter(cluster),
            announcer=Announcer(cluster, settings.identity, _now),
        )
    )


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Run several things until one of them ends; the others are cancelled then, and their ends waited for.

    Raises:
        Exception: what the one that ended was ended by.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        _LOG.warning("%s failed: %s", doing, error)


def _ready_condition(status: dict[str, Any]) -> tuple[str, str]:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "Ready":
            return str(condition.get("status", "")), str(condition.get("reason", ""))
    return "Unknown", ""


def _now() -> datetime:
    return datetime.now(UTC)


def operate(settings: OperateSettings) -> int:
    """Run an operator in this process until a signal stops it. Returns the exit status.

    Raises:
        OperatorError: it cannot start.
    """
    set_up_logging("operator")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(_run(settings))
    return 0


async def _run(settings: OperateSettings) -> None:
    stopping = asyncio.Event()
    take_signals = partial(_take_signals, asyncio.get_running_loop(), stopping)
    take_signals()
    configuration = await load_configuration(settings.kubeconfig)
    metrics, client, pods = OperatorMetrics(), connect(configuration), HttpPods()
    try:
        # The lease's own requests pass no fence and wait for no token.
        unfenced = KubeCluster(client, AlwaysLeads(), TokenBucket(settings.writes_per_s, settings.write_burst), metrics)
        place = (settings.cluster.operator_namespace, settings.lease_name)
        election = (
            Leadership(unfenced, place, settings.identity, settings.timing.lease)
            if settings.leader_election
            else AlwaysLeads()
        )
        writes = TokenBucket(settings.writes_per_s, settings.write_burst)
        outside = Outside(
            cluster=KubeCluster(client, election, writes, metrics),
            election=election,
            pods=pods,
            credentials=partial(credentials_of, configuration),
            metrics=metrics,
        )
        await Operator(settings, outside).run(stopping, take_signals)
    finally:
        await pods.close()
        await client.close()


def _take_signals(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    """Stop on a signal. kopf sets handlers of its own whenever it starts, so these are set after it again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
