"""One InferenceService on this machine: compares its plan with what runs, and does what is missing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus

from pagefleet_operator.local.reporter import ServiceView
from pagefleet_operator.local.supervisor import Supervisor, World
from pagefleet_operator.plan.rollout import Drain, State, next_steps
from pagefleet_operator.plan.status import Observation, find_condition, service_status
from pagefleet_operator.plan.workloads import Plan, Role, Workload, plan_workloads


class ServiceRunner:
    """Level-triggered: `reconcile` may be called at any time, and does nothing when all is as wanted."""

    def __init__(self, service: InferenceService, world: World, tasks: asyncio.TaskGroup) -> None:
        self.service = service
        """What is wanted; its `status` is the last one."""
        self._world = world
        self._tasks = tasks
        self._generation = 1
        self._supervisors: dict[Role, dict[int, Supervisor]] = {"engine": {}, "router": {}}
        self._endpoints: tuple[Endpoint, ...] | None = None
        self._leaving = False

    @property
    def gone(self) -> bool:
        """Whether it was asked to leave and nothing of it runs any more."""
        return self._leaving and not any(self._supervisors.values())

    @property
    def url(self) -> str:
        """Where its first router listens."""
        return self._world.launcher.claim_ports(self.service)

    @property
    def ready(self) -> bool:
        """Whether all of it answers requests."""
        condition = find_condition(self.service.status, "Ready")
        return condition is not None and condition.status == "True"

    def change(self, service: InferenceService) -> bool:
        """Take a new spec. Returns whether it differs from the last one."""
        before = self.service
        if before.spec == service.spec and before.metadata == service.metadata:
            return False
        self._generation += before.spec != service.spec
        self.service = service.model_copy(update={"status": before.status})
        return True

    def leave(self) -> None:
        """Let everything finish and end: routers first, since engines serve them."""
        self._leaving = True

    def kill(self) -> None:
        """End everything now."""
        self._leaving = True
        for supervisor in self._all():
            supervisor.kill()

    def reconcile(self) -> None:
        """Take the next steps towards the wanted state, and tell the routers and the status what is so."""
        plan = self._plan()
        if self._leaving:
            self._drain_in_order()
        else:
            for workload in (plan.engine, plan.router):
                self._take_steps(workload)
        self._write_endpoints()
        if not self._leaving:
            self._update_status(plan)

    def view(self) -> ServiceView:
        """Return what there is to show."""
        status = None if self._leaving else self.service.status
        return ServiceView(self.service.name, status, tuple((one.name, one.observe()) for one in self._all()))

    def _plan(self) -> Plan:
        gpus = self._world.launcher.gpus
        resources = self.service.spec.resources
        spare = gpus.total > (resources.gpus or 0) * self.service.spec.replicas
        return plan_workloads(self.service, self._world.timing.drain, spare_gpu=spare)

    def _take_steps(self, workload: Workload) -> None:
        supervisors = self._supervisors[workload.role]
        for step in next_steps(workload, [one.observe() for one in supervisors.values()]):
            if isinstance(step, Drain):
                supervisors[step.number].drain(routed=workload.role == "engine")
            else:
                supervisor = Supervisor(self.service.name, workload, step.number, self._world)
                supervisors[step.number] = supervisor
                self._tasks.create_task(self._run(workload.role, supervisor))

    async def _run(self, role: Role, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        finally:
            del self._supervisors[role][supervisor.number]
            if role == "router" and supervisor.number >= self.service.spec.router.replicas:
                self._world.launcher.ports.release(supervisor.name)
            self._world.changed()

    def _drain_in_order(self) -> None:
        first = self._supervisors["router"] or self._supervisors["engine"]
        for supervisor in first.values():
            supervisor.drain(routed=False)

    def _write_endpoints(self) -> None:
        endpoints = []
        for supervisor in self._supervisors["engine"].values():
            state = supervisor.observe().state
            if supervisor.url and state in (State.READY, State.DRAINING):
                draining = state is State.DRAINING
                endpoints.append(Endpoint(supervisor.name, supervisor.url, self.service.model_name, draining))
        if tuple(endpoints) == self._endpoints:
            return
        try:
            self._world.state.write_endpoints(self.service.name, tuple(endpoints))
            self._endpoints = tuple(endpoints)
        except OSError as error:  # tried again at the next reconcile
            self._world.reporter.say(f"{self.service.name}: the endpoints file cannot be written: {error.strerror}")

    def _update_status(self, plan: Plan) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        seen = Observation(
            engines=tuple(one.observe() for one in self._supervisors["engine"].values()),
            routers=tuple(one.observe() for one in self._supervisors["router"].values()),
            generation=self._generation,
            url=self.url,
        )
        before, status = self.service.status, service_status(self.service, plan, seen, now)
        self.service = self.service.model_copy(update={"status": status})
        for line in _news(before, status):
            self._world.reporter.say(f"{self.service.name}: {line}")

    def _all(self) -> list[Supervisor]:
        return [one for role in self._supervisors.values() for _, one in sorted(role.items())]


def _news(before: InferenceServiceStatus | None, status: InferenceServiceStatus) -> list[str]:
    """Return what became different enough to be told: being ready or not, and the end of a rollout, good or bad."""
    lines = []
    ready, was_ready = find_condition(status, "Ready"), find_condition(before, "Ready")
    if was_ready and ready and was_ready.status != ready.status:
        word = "ready" if ready.status == "True" else "partly ready" if _serves(status) else "not ready"
        # What went wrong with which instance was told when it happened.
        lines.append(f"{word}, {ready.message.partition(';')[0]}")
    progress, was_progress = find_condition(status, "Progressing"), find_condition(before, "Progressing")
    if was_progress and progress and was_progress.reason != progress.reason:
        if progress.reason == "RolloutStopped":
            lines.append(f"the rollout stopped: {progress.message}")
        elif progress.reason == "Settled" and was_progress.reason in ("RollingOut", "Scaling"):
            lines.append(f"settled, {progress.message}")
    return lines


def _serves(status: InferenceServiceStatus) -> bool:
    return all(role.ready for role in status.roles)
