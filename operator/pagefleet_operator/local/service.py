"""One InferenceService on this machine: compares its plan with what runs, and does what is missing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.inference_status import EngineRole, InferenceServiceStatus, Role

from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.local.figures import FigureWatch, together
from pagefleet_operator.local.fleet_watch import FleetWatch
from pagefleet_operator.local.model_fetch import ModelFetch, model_order
from pagefleet_operator.local.scalers import Scalers, Surroundings
from pagefleet_operator.local.supervisor import Supervisor, World
from pagefleet_operator.local.table import ServiceView
from pagefleet_operator.local.trial import LocalTrial
from pagefleet_operator.local.wanted import Wanted
from pagefleet_operator.plan.autoscaling import least_of_view, most_engines
from pagefleet_operator.plan.canary import step_of
from pagefleet_operator.plan.gpu_fit import Fit, check_fit
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.plan.pair_ratio import ENOUGH
from pagefleet_operator.plan.pair_steps import Instances, engine_steps
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.role_health import see_instances
from pagefleet_operator.plan.role_seen import RoleSeen, both_parts
from pagefleet_operator.plan.roles import PAIR_ROLES, engine_views, is_disaggregated
from pagefleet_operator.plan.rollout import Drain, Instance, State, Step, next_steps
from pagefleet_operator.plan.status import Situation, service_status
from pagefleet_operator.plan.verdict import Verdict, find_condition
from pagefleet_operator.plan.workloads import PartSettings, Plan, Workload, plan_workloads

_ENGINES: tuple[EngineRole, ...] = ("engine", "prefill", "decode")
_ROLES: tuple[Role, ...] = ("engine", "prefill", "decode", "router")
_PAUSED = Verdict(False, Reason.PAUSED, "none are started while spec.paused is true")
_WAITS = Verdict(False, Reason.WAITING_FOR_MODEL, "engines wait for the model; ModelCached says more")


class ServiceRunner:
    """Level-triggered: `reconcile` may be called at any time, and does nothing when all is as wanted."""

    def __init__(self, wanted: Wanted, world: World, tasks: asyncio.TaskGroup) -> None:
        self.service = wanted.service
        """What is wanted; its `status` is the last one."""
        self._wanted = wanted
        self._world = world
        self._tasks = tasks
        self._generation = 1
        self._fetch: ModelFetch | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._supervisors: dict[Role, dict[int, Supervisor]] = {role: {} for role in _ROLES}
        self._endpoints: tuple[Endpoint, ...] | None = None
        self._news = b""
        self._kv_peers: tuple[str, ...] | None = None
        self._scalers = Scalers(world.timing, tasks, self._surroundings, self._tell)
        self._watch = FleetWatch(world.timing, self._part_urls, self._router_urls, world.changed)
        self._figures = FigureWatch(world.timing.figures_period, world.timing.probe_timeout, self._engine_urls)
        self._trial = LocalTrial()
        self._watching: list[asyncio.Task[None]] = []
        self._start_up_s: float | None = None
        self._leaving = False

    @property
    def gone(self) -> bool:
        """Whether it was asked to leave and nothing of it runs any more."""
        return self._leaving and not any(self._supervisors.values())

    @property
    def url(self) -> str:
        return self._world.launcher.claim_ports(self.service)

    @property
    def ready(self) -> bool:
        condition = find_condition(self.service.status, "Ready")
        return condition is not None and condition.status == "True"

    def change(self, wanted: Wanted) -> bool:
        """Take a new spec, or new settings by a profile. Returns whether they differ from the last ones."""
        before, service = self.service, wanted.service
        same = before.spec == service.spec and before.metadata == service.metadata
        if same and (self._wanted.resolved, self._wanted.parts) == (wanted.resolved, wanted.parts):
            return False
        self._generation += before.spec != service.spec
        self._wanted = wanted
        self.service = service.model_copy(update={"status": before.status})
        return True

    def leave(self) -> None:
        """Let everything finish and end: routers first, since engines serve them."""
        self._leaving = True

    def kill(self) -> None:
        self._leaving = True
        for supervisor in self._all():
            supervisor.kill()

    def reconcile(self) -> None:
        """Take the next steps towards the wanted state, and tell the routers and the status what is so."""
        self._follow_model()
        self._scalers.follow(None if self._leaving else self.service, lambda role: len(self._supervisors[role]))
        self._follow_watch()
        self._write_peers()
        plan = self._plan()
        if self._leaving:
            self._drain_in_order()
        elif not self.service.spec.paused:
            # Engines of the model before serve until the next one is here.
            if self._fetch is None or self._fetch.complete or plan.num_engines == 0:
                self._take_engine_steps(plan)
            self._take_steps(plan.router, next_steps(plan.router, self._observe("router")))
        self._write_endpoints()
        if not self._leaving:
            self._update_status(plan)

    def view(self) -> ServiceView:
        status = None if self._leaving else self.service.status
        told = self._figures.figures
        figures = {one.name: together([told[n] for n in one.endpoint_urls if n in told]) for one in self._all()}
        seen = {one.name: one.process for one in self._all()}
        return ServiceView(
            self.service.name,
            status,
            tuple((one.name, one.observe()) for one in self._all()),
            {name: replace(one, figures=figures.get(name)) for name, one in seen.items() if one is not None},
            self._fetch.view() if self._fetch is not None else None,
        )

    def _plan(self) -> Plan:
        plan = self._unlimited_plan()
        parts = tuple(replace(one, replicas=self._within_gpus(one)) for one in plan.parts)
        return replace(plan, engine=replace(plan.engine, replicas=self._within_gpus(plan.engine)), parts=parts)

    def _unlimited_plan(self) -> Plan:
        wanted, gpus = self._wanted, self._world.launcher.gpus
        each = max(one.gpus * one.nodes for one in (wanted.parts.values() or (wanted.resolved,)))
        spare = gpus.total > each * most_engines(self.service)
        parts = {role: PartSettings(own, self._scalers.desired(role)) for role, own in wanted.parts.items()}
        location, scaling = self._location(), self._scalers.desired("engine")
        return plan_workloads(self.service, wanted.resolved, location, spare_gpu=spare, scaling=scaling, parts=parts)

    def _within_gpus(self, engines: Workload) -> int:
        """Return how many of the wanted engines there are GPUs for; `check_gpus` knows that there are for the least."""
        role: EngineRole = "engine" if engines.role == "router" else engines.role
        view = engine_views(self.service).get(role)
        if not engines.gpus or view is None or self._scalers.desired(role) is None:
            return engines.replicas
        room = self._world.launcher.gpus.room(engines.name) // (engines.gpus * engines.nodes)
        return min(engines.replicas, max(room, least_of_view(view)))

    def _follow_watch(self) -> None:
        """Have routers and engines asked how they are, until this leaves."""
        if self._leaving:
            for task in self._watching:
                task.cancel()
            self._watching = []
        elif not self._watching:
            watches = [self._watch.run()] + ([self._figures.run()] if self._world.reporter.wants_figures else [])
            self._watching = [self._tasks.create_task(watch) for watch in watches]

    def _engine_urls(self) -> dict[str, str]:
        return _endpoints_of(self._engines())

    def _part_urls(self) -> dict[str, str]:
        return _endpoints_of(one for role in PAIR_ROLES for one in self._supervisors[role].values())

    def _router_urls(self) -> dict[str, str]:
        routers = self._supervisors["router"].values()
        return {one.name: one.url for one in routers if one.url and one.observe().state is State.READY}

    def _surroundings(self, role: EngineRole) -> Surroundings:
        engines, plan = self._observe(role), self._unlimited_plan()
        wanted = next((one for one in plan.parts if one.role == role), plan.engine)
        starting = sum(one.state is State.STARTING and not one.failing for one in engines)
        # Engines that wait for their model are on their way too.
        waiting = self._fetch is not None and not self._fetch.complete
        taken = [one.start_up_s for one in self._engines() if one.start_up_s is not None]
        self._start_up_s = max(taken, default=self._start_up_s)
        return Surroundings(
            engines=EnginesSeen(
                ready=sum(one.state is State.READY for one in engines),
                warming=wanted.replicas if waiting else starting,
                refused=wanted.replicas - self._within_gpus(wanted),
                start_up_s=self._start_up_s,
                endpoints=wanted.endpoints,
            ),
            routers={
                one.name: one.address
                for one in self._supervisors["router"].values()
                if one.observe().state is not State.DRAINING
            },
            paused=self.service.spec.paused,
        )

    def _location(self) -> str:
        """Return what engines load: known before it is there."""
        if self._fetch is not None:
            return str(self._fetch.order.folder)
        uri = self._wanted.resolved.uri
        return uri.local_path if uri.scheme == "file" else self.service.spec.model.uri

    def _follow_model(self) -> None:
        """Have the wanted model downloaded, and no other."""
        world, service = self._world, self.service
        order = None if self._leaving else model_order(service, self._wanted.resolved.uri, world.settings.models_dir)
        if order == (self._fetch.order if self._fetch else None) or (service.spec.paused and not self._leaving):
            return
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
        self._fetch = None
        if order is not None:
            backoff = Backoff(world.timing.backoff_first, world.timing.backoff_most, world.jitter)
            self._fetch = ModelFetch(order, world.settings.download, world.environment, backoff, self._tell)
            self._fetching = self._tasks.create_task(self._fetch.run())

    def _model_verdict(self) -> Verdict:
        if self._fetch is not None:
            return self._fetch.verdict()
        uri = self._wanted.resolved.uri
        if uri.fetchable:
            return Verdict(False, Reason.PAUSED, "spec.paused is true: set it to false to have the model downloaded")
        if uri.scheme == "file" and not Path(uri.local_path).is_dir():
            text = f"{uri.local_path}: there is no such folder on this machine: make it, or correct spec.model.uri"
            return Verdict(False, Reason.MODEL_NOT_FOUND, text)
        return Verdict(True, Reason.NOT_NEEDED, "the model is on this machine")

    def _tell(self, text: str) -> None:
        if text:
            self._world.reporter.say(f"{self.service.name}: {text}")
        self._world.changed()

    def _take_engine_steps(self, plan: Plan) -> None:
        trial, heard = self._watch.trial, (self._watch.trial.figures(), datetime.now(UTC))
        existing: Instances = {role: self._observe(role) for role in _ENGINES}
        led = self._trial.steps(self.service, plan.parts or (plan.engine,), existing, heard)
        trial.follow(self._trial.status)
        if led is not None:
            for workload, of_one in led:
                self._take_steps(workload, of_one)
            return
        steps = engine_steps(plan, existing)
        workloads: dict[Role, Workload] = {one.role: one for one in (plan.engine, *plan.parts)}
        for role, found in steps.items():
            self._take_steps(workloads.get(role, replace(plan.engine, role=role)), found)

    def _take_steps(self, workload: Workload, steps: Sequence[Step]) -> None:
        supervisors = self._supervisors[workload.role]
        for step in steps:
            if isinstance(step, Drain):
                supervisors[step.number].drain(routed=workload.role != "router")
            else:
                supervisor = Supervisor(self.service.name, workload, step.number, self._world)
                supervisors[step.number] = supervisor
                self._tasks.create_task(self._run(workload.role, supervisor))

    def _observe(self, role: Role) -> list[Instance]:
        return [one.observe() for one in self._supervisors[role].values()]

    def _engines(self) -> Iterator[Supervisor]:
        return (one for role in _ENGINES for one in self._supervisors[role].values())

    async def _run(self, role: Role, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        finally:
            del self._supervisors[role][supervisor.number]
            if role == "router" and supervisor.number >= self.service.spec.router.replicas:
                self._world.launcher.ports.release(supervisor.name)
            self._world.changed()

    def _drain_in_order(self) -> None:
        routers = self._supervisors["router"].values()
        for supervisor in routers or self._engines():
            supervisor.drain(routed=False)

    def _write_peers(self) -> None:
        """Tell decode engines whom they may ask; engines that leave may still be asked for what they have computed."""
        if not is_disaggregated(self.service) and self._kv_peers is None:
            return
        addresses = tuple(kv for one in self._supervisors["prefill"].values() for kv in one.kv_addresses)
        if addresses == self._kv_peers:
            return
        try:
            self._world.state.write_kv_peers(self.service.name, addresses)
            self._kv_peers = addresses
        except OSError as error:  # tried again at the next reconcile
            self._world.reporter.say(f"{self.service.name}: the file of KV peers cannot be written: {error.strerror}")

    def _write_endpoints(self) -> None:
        endpoints = []
        for supervisor in self._engines():
            seen = supervisor.observe()
            draining, coming = seen.state is State.DRAINING, seen.state is State.STARTING
            listed = supervisor.address if coming else supervisor.url
            if listed and (draining or coming or seen.state is State.READY):
                model, share = self.service.model_name, self._trial.share(seen.revision)
                for name, url in supervisor.endpoint_urls.items():
                    endpoints.append(Endpoint(name, url, model, draining, coming, seen.revision, share))
        if tuple(endpoints) == self._endpoints:
            return
        try:
            self._world.state.write_endpoints(self.service.name, tuple(endpoints))
            self._endpoints = tuple(endpoints)
        except OSError as error:  # tried again at the next reconcile
            self._world.reporter.say(f"{self.service.name}: the endpoints file cannot be written: {error.strerror}")

    def _update_status(self, plan: Plan) -> None:
        before, status = self.service.status, service_status(self._situation(plan))
        self.service = self.service.model_copy(update={"status": status})
        self._write_news()
        for line in _news(before, status):
            self._world.reporter.say(f"{self.service.name}: {line}")

    def _write_news(self) -> None:
        """Tell the routers' console how the service is, and what was decided about it."""
        own = {"metadata": {"name"}, "status": {"conditions", "scaling", "role_scaling"}}
        news = self.service.model_dump_json(by_alias=True, include=own).encode()
        if news == self._news:
            return
        self._news = news
        with contextlib.suppress(OSError):  # a full disk costs the console what is new
            self._world.state.write_service(self.service.name, news)

    def _situation(self, plan: Plan) -> Situation:
        seen = Observed(
            now=datetime.now(UTC),
            generation=self._generation,
            live=self._watch.live,
            scaling=self._scalers.seen("engine"),
            role_scaling={role: seen for role in PAIR_ROLES if (seen := self._scalers.seen(role))},
            kv_engines=self._watch.seen,
            pair_load=self._watch.load,
        )
        model = self._model_verdict()
        # Whether there is room for it is found out by the engine itself, on this machine.
        fit = check_fit(self.service, replace(self._resolved(), memory=None, profile=None))
        parts = tuple(self._see(one) for one in plan.parts)
        coming = not model.holds and plan.num_engines > 0
        return Situation(
            service=self.service,
            previous=self.service.status,
            observed=seen,
            url=self.url,
            model=model,
            engines=both_parts(*parts) if len(parts) == 2 else self._see(plan.engine),
            routers=self._see(plan.router),
            parts=parts,
            resolved=self._resolved(),
            fit=Fit(memory=fit.memory, max_model_len=fit.max_model_len),
            canary=self._trial.status,
            gate=_WAITS if coming else None,
            nothing=_PAUSED if self.service.spec.paused else None,
        )

    def _see(self, workload: Workload) -> RoleSeen:
        """Gather the instances of a workload, and those that it replaces: decode engines take over from whole ones."""
        kinds: Mapping[Role, tuple[Role, ...]] = {"engine": _ENGINES, "decode": ("decode", "engine")}
        found = (self._observe(role) for role in kinds.get(workload.role, (workload.role,)))
        return see_instances(workload, [one for instances in found for one in instances])

    def _resolved(self) -> Resolved:
        """Return the settings in force, with what the download found out of the model."""
        resolved, facts = self._wanted.resolved, self._fetch.facts if self._fetch else None
        return replace(resolved, facts=facts, revision=(facts.revision if facts else "") or resolved.revision)

    def _all(self) -> list[Supervisor]:
        return [one for role in self._supervisors.values() for _, one in sorted(role.items())]


def _endpoints_of(supervisors: Iterable[Supervisor]) -> dict[str, str]:
    """Return where those that are ready take requests."""
    ready = (one for one in supervisors if one.url and one.observe().state is State.READY)
    return {name: url for one in ready for name, url in one.endpoint_urls.items()}


def _news(before: InferenceServiceStatus | None, status: InferenceServiceStatus) -> list[str]:
    """Return what became different enough to be told: being ready or not, and the end of a rollout, good or bad."""
    lines = []
    if before and _word(before) != _word(status):
        # What went wrong with which instance was told when it happened.
        parts = [find_condition(status, kind) for kind in ("EngineReady", "RouterReady", "Ready")]
        first = next((part for part in parts if part and part.status != "True"), parts[-1])
        lines.append(f"{_word(status)}, {first.message.partition(';')[0] if first else ''}")
    progress, was_progress = find_condition(status, "Progressing"), find_condition(before, "Progressing")
    if was_progress and progress and was_progress.reason != progress.reason:
        if progress.reason == Reason.ROLLOUT_STOPPED:
            lines.append(f"the rollout stopped: {progress.message}")
        elif progress.reason == Reason.SETTLED and was_progress.reason in (Reason.ROLLING_OUT, Reason.SCALING):
            lines.append(f"settled, {progress.message}")
    if step_of(status.canary) != step_of(before.canary if before else None) and status.canary:
        lines.append(status.canary.message)
    return lines + _advice(before, status)


def _advice(before: InferenceServiceStatus | None, status: InferenceServiceStatus) -> list[str]:
    """Return what to change about the numbers of prefill and decode engines: other figures alone are no news."""
    was, now = (one.ratio.message if one and one.ratio else ENOUGH for one in (before, status))
    change = now.partition(":")[0]
    return [f"advice: {now}"] if change not in (ENOUGH, was.partition(":")[0]) else []


def _word(status: InferenceServiceStatus) -> str:
    held = {one.type: one.reason for one in status.conditions if one.status == "True"}
    if "Ready" not in held:
        return "not ready"
    if held["Ready"] in (Reason.IDLE, Reason.WAKING):
        return held["Ready"].lower()
    return "ready" if {"EngineReady", "RouterReady"} <= held.keys() else "partly ready"
