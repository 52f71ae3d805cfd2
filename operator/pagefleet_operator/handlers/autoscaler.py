"""Asks the routers of every service that scales by itself, every two seconds, and decides how many engines it needs.

The reconcile carries it out. What is remembered starts anew with each leader: from the status, and the engines that
exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import EngineRole, InferenceServiceStatus
from pagefleet_protocol.resource_documents import parse_inference_service
from pydantic import ValidationError

from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.router_page import read_router_page
from pagefleet_operator.autoscale.scaler import Scaler, scalers_of
from pagefleet_operator.autoscale.signals import STALE_S, FleetSignals, FleetWindow, pair_load
from pagefleet_operator.autoscale.state import Decision, ScalingReason
from pagefleet_operator.autoscale.trial_window import TrialWindow
from pagefleet_operator.handlers.cluster_view import ClusterView, Key, StoredService
from pagefleet_operator.handlers.pod_http import PodHttp
from pagefleet_operator.plan.canary import TrialFigures
from pagefleet_operator.plan.engine_sets import (
    ENGINE_SETS,
    deployed_replicas,
    is_grouped,
    progress_s,
    replicas_in,
    whole_sets,
)
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import PodSeen, ScalingSeen
from pagefleet_operator.plan.pair_ratio import PairLoad
from pagefleet_operator.plan.role_health import groups_are_late
from pagefleet_operator.plan.roles import is_disaggregated, role_status_view
from pagefleet_operator.render.engine_pairs import deployed_pairs
from pagefleet_operator.render.ports import endpoints_of

_LOG = logging.getLogger(__name__)
PERIOD_S = 2.0
ASK_S = 4.0
"""For all routers of all services together, however many are dead: well within STALE_S of the look before."""
TELL_S = 30.0
"""Between two looks of the reconcile at numbers that lead to the same decision."""
FAILED_STARTS = 3
"""Restarts of a container after which an engine that is not ready is not on its way any more."""
START_DEADLINE_S = 1800.0
"""An engine that is not ready by then is not on its way, where nobody said for how long it may start."""
_ENDED = ("Failed", "Succeeded")
_ASKED_FOR = (b'"autoscaling"', b'"disaggregation"', b'"canary"')
"""What routers are asked for, as it stands in a document."""


@dataclass(frozen=True, slots=True)
class ScalingGauge:
    """What metrics say of one service."""

    key: Key
    role: EngineRole
    """Engines for whole requests, or of one part of them."""
    desired: int
    current: int
    age_s: float
    """Of the oldest word of a router; infinite: one never spoke."""


@dataclass(slots=True)
class _Followed:
    """One service that scales by itself."""

    document: bytes
    uid: str
    service: InferenceService
    scalers: dict[EngineRole, Scaler]
    gauges: dict[EngineRole, ScalingGauge] = field(default_factory=dict)
    window: FleetWindow = field(default_factory=FleetWindow)
    trial: TrialWindow = field(default_factory=TrialWindow)
    load: PairLoad | None = None
    """Of a disaggregated service, whether it scales by itself or not."""
    told_at: float = float("-inf")
    met: dict[str, float] = field(default_factory=dict)
    """When each router was first seen to run."""

    def rest(self) -> None:
        """Say nothing more of it while it is paused, and begin with what there is afterwards."""
        self.gauges.clear()
        for scaler in self.scalers.values():
            scaler.rest()

    def speakers(self, running: Sequence[str], now: float) -> list[str]:
        """Return the routers that should speak: not those that have only begun to run, and have not spoken yet."""
        self.met = {name: self.met.get(name, now) for name in running}
        return [name for name in running if self.window.heard(name) or now - self.met[name] >= STALE_S]


class Autoscaler:
    """Keeps the last decision for each service."""

    def __init__(
        self,
        pods: PodHttp,
        view: ClusterView,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = PERIOD_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Start without decisions; `count` is told the reason of each, `now` is what people's clocks show."""
        self._pods = pods
        self._view = view
        self._count = count
        self._clock = clock
        self._period_s = period_s
        self._now = now
        self._followed: dict[Key, _Followed] = {}

    def seen(self, key: Key, role: EngineRole = "engine") -> ScalingSeen | None:
        """Return the last decision for a service; None: there is none, or nobody has asked its routers yet."""
        followed = self._followed.get(key)
        scaler = followed.scalers.get(role) if followed is not None else None
        return scaler.seen(f"more pods are refused: kubectl -n {key[0]} describe quota") if scaler is not None else None

    def pair_load(self, key: Key) -> PairLoad | None:
        """Return what routers measured of a disaggregated service; None: they say nothing, or it is none."""
        followed = self._followed.get(key)
        return followed.load if followed is not None else None

    def trial(self, key: Key) -> TrialFigures | None:
        """Return what routers counted of a revision that is tried out; None: they say nothing, or none is."""
        followed = self._followed.get(key)
        return followed.trial.figures() if followed is not None else None

    def gauges(self) -> Iterator[ScalingGauge]:
        """Yield what metrics say."""
        return (gauge for one in tuple(self._followed.values()) for gauge in tuple(one.gauges.values()))

    def start_over(self) -> None:
        """Forget everything: another process may have decided meanwhile."""
        self._followed.clear()

    async def run(self, wake: Callable[[Iterable[Key]], None]) -> None:
        """Decide for ever; `wake` gets the services whose decision changed."""
        while True:
            started = self._clock()
            wake(await self.look())
            await asyncio.sleep(max(self._period_s / 20, self._period_s - (self._clock() - started)))

    async def look(self) -> Sequence[Key]:
        """Ask and decide once for every service; returns those to be reconciled because of it."""
        changed: list[Key] = []

        async def one(key: Key, followed: _Followed) -> None:
            if await self._decide(key, followed):
                changed.append(key)

        async with asyncio.TaskGroup() as group:
            for key, followed in self._follow():
                group.create_task(one(key, followed))
        return changed

    def _follow(self) -> list[tuple[Key, _Followed]]:
        """Return the services that scale by themselves now, and forget others."""
        found: dict[Key, _Followed] = {}
        for key in self._view.services():
            stored = self._view.service(key)
            if stored is None or stored.deleting or not any(name in stored.document for name in _ASKED_FOR):
                continue
            followed = self._followed.get(key)
            if followed is None or (followed.uid, followed.document) != (stored.uid, stored.document):
                followed = _renewed(stored, followed)
            if followed is not None:
                found[key] = followed
        self._followed = found
        for one in found.values():
            if one.service.spec.paused:
                one.rest()
        return [(key, one) for key, one in found.items() if not one.service.spec.paused]

    async def _decide(self, key: Key, followed: _Followed) -> bool:
        routers = [pod for pod in self._view.pods(key) if pod.component == "router" and _runs(pod)]
        pages = await asyncio.gather(*(self._page(pod.ip) for pod in routers))
        now = self._clock()
        for pod, page in zip(routers, pages, strict=True):
            reading = read_router_page(page) if page is not None else None
            if reading is not None:
                followed.window.add(pod.name, reading, now)
        signals = followed.window.signals(followed.speakers([pod.name for pod in routers], now), now)
        stored = self._view.service(key)
        if stored is None:
            return False
        if followed.service.spec.rollout.canary:
            status = _status(stored)
            followed.trial.follow(status.canary if status else None)
            followed.trial.keep_only(frozenset(pod.name for pod in routers))
            for pod, page in zip(routers, pages, strict=True):
                if page is not None:
                    followed.trial.hear(pod.name, page)
        if is_disaggregated(followed.service):
            followed.load = pair_load(signals)
        news = [self._decide_about(key, stored, followed, role, (signals, now)) for role in followed.scalers]
        if any(news):
            followed.told_at = now
        return any(news)

    def _decide_about(
        self, key: Key, stored: StoredService, followed: _Followed, role: EngineRole, heard: tuple[FleetSignals, float]
    ) -> bool:
        """Decide; return whether it is to be told."""
        signals, now = heard
        (body, deployed), scaler = self._deployment(key, stored.uid, followed.service, role), followed.scalers[role]
        pods = [pod for pod in self._view.pods(key) if role in ("engine", pod.role)]
        engines = engines_seen(pods, body, self._now())
        if scaler.state is None:
            status = _status(stored)
            before = status if role == "engine" else role_status_view(status, role)
            scaler.begin(before, deployed, now)
        before_it = scaler.decision
        decision = scaler.decide(signals, engines, now)
        followed.gauges[role] = ScalingGauge(key, role, decision.desired, engines.count, signals.age_s)
        self._count(str(decision.reason))
        if before_it is not None and before_it.desired != decision.desired:
            _LOG.info(
                "%s/%s: %s: from %d to %d, %s: %s",
                *key, role, before_it.desired, decision.desired, decision.reason, decision.message,
            )  # fmt: skip
        return _news(before_it, decision) or (now - followed.told_at >= TELL_S and before_it != decision)

    def _deployment(
        self, key: Key, uid: str, service: InferenceService, role: EngineRole
    ) -> tuple[Mapping[str, Any], int | None]:
        """Return what makes these engines, of several what makes the most (empty: nothing does), and their number.

        The number is None where one kind of engines replaces the other: then those of both are steps.
        """
        if role == "engine":
            name, children = names_of(service).engine, self._view.children(key, uid, *ENGINE_SETS)
            body = _largest(one.body for one in whole_sets(children, name))
            return body, deployed_replicas(children, name)
        pairs = deployed_pairs(self._view.children(key, uid, *ENGINE_SETS))
        body = _largest(pair[role] for pair in pairs.values() if role in pair)
        return body, replicas_in(body)

    async def _page(self, ip: str) -> bytes | None:
        """Return a router's page; None too where its turn did not come within ASK_S, as others' time ran out first."""
        try:
            async with asyncio.timeout(ASK_S):
                return await self._pods.router_page(ip)
        except TimeoutError:
            return None


def _largest(bodies: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(bodies, key=lambda body: replicas_in(body) or 0, default={})


def engines_seen(pods: Iterable[PodSeen], deployment: Mapping[str, Any], now: datetime) -> EnginesSeen:
    """Return the engines that exist.

    Args:
        pods: of one service.
        deployment: of its engines, or their LeaderWorkerSet, as the API server has it; empty where there is none.
        now: to which a start may have taken too long.
    """
    spec: Mapping[str, Any] = deployment.get("spec") or {}
    deadline_s = progress_s(deployment) or START_DEADLINE_S
    exist = [pod for pod in pods if pod.component == "engine" and pod.phase not in _ENDED]
    engines = [pod for pod in exist if not pod.deleting]
    ready = [pod for pod in engines if pod.ready]
    late = is_grouped(deployment) and groups_are_late(deployment, engines, now)
    coming = [pod for pod in engines if not pod.ready and not (late and pod.place)]
    warming = sum(_warms_up(pod, deadline_s, now) for pod in coming)
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    refused = any(one.get("type") == "ReplicaFailure" and one.get("status") == "True" for one in conditions)
    wanted = spec.get("replicas") or 0
    starts = [(pod.turned - pod.created).total_seconds() for pod in ready if pod.turned and pod.created]
    return EnginesSeen(
        ready=len(ready),
        warming=warming,
        failing=len(engines) - len(ready) - warming,
        # Those that leave hold their part of a quota until they are gone; then others come in their place.
        refused=max(0, wanted - len(exist)) if refused else 0,
        # One that was ready, failed and came back seems to have taken longer.
        start_up_s=max(0.0, min(starts)) if starts else None,
        endpoints=endpoints_of(deployment),
    )


def _warms_up(pod: PodSeen, deadline_s: float, now: datetime) -> bool:
    """Return whether a pod that is not ready may come to be: not one that fails again and again, or starts for ever."""
    if any(one.restarts >= FAILED_STARTS for one in pod.containers):
        return False
    return pod.created is None or (now - pod.created).total_seconds() < deadline_s


def _renewed(stored: StoredService, before: _Followed | None) -> _Followed | None:
    """Return a service as it is written now, with what was remembered of it; None: it does not scale by itself."""
    try:
        service = parse_inference_service(msgspec.json.decode(stored.document))
    except InvalidDocument:
        return before  # what ran before the edit goes on, by the rules before
    scalers = scalers_of(service)
    if not scalers and not is_disaggregated(service) and service.spec.rollout.canary is None:
        return None
    followed = _Followed(stored.document, stored.uid, service, scalers)
    if before is None or before.uid != stored.uid:
        return followed
    followed.trial = before.trial
    for role, scaler in scalers.items():
        was = before.scalers.get(role)
        if was is not None and was.mode == scaler.mode:
            scaler.take_over(was)
            followed.window, followed.met = before.window, before.met
    return followed


def _status(stored: StoredService) -> InferenceServiceStatus | None:
    try:
        return InferenceServiceStatus.model_validate_json(stored.status)
    except ValidationError:
        return None


def _runs(pod: PodSeen) -> bool:
    """Return whether a router is to be asked: one without an engine is not ready, and holds requests all the same."""
    return bool(pod.ip) and not pod.deleting and pod.phase == "Running"


def _news(before: Decision | None, after: Decision) -> bool:
    missing = ScalingReason.SIGNALS_MISSING
    return before is None or before.desired != after.desired or (before.reason == missing) != (after.reason == missing)
