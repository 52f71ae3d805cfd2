"""The operator in a test's own event loop, against the emulated API server. No test in here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.connection import credentials_of
from pagefleet_operator.apply.kube_cluster import KubeCluster, TokenBucket, connect
from pagefleet_operator.handlers.backlog import Pace
from pagefleet_operator.handlers.lease import AlwaysLeads, Leadership, LeaseTimes
from pagefleet_operator.handlers.metrics import OperatorMetrics
from pagefleet_operator.handlers.operator import Operator, Outside
from pagefleet_operator.handlers.settings import OperateSettings, Timing
from pagefleet_operator.handlers.watches import WatchTimes
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_protocol.model_facts import Progress

from tests.fakes.kube_api import KubeApi
from tests.fakes.kube_store import Write

NAMESPACE = "apps"
QUICK = Timing(
    finish=1.0,
    lease=LeaseTimes(lease_s=2.5, renew_deadline_s=1.8, retry_s=0.2, request_s=1.0),
    watch=WatchTimes(reconnect=0.02, retry=0.05),
    pace=Pace(least_s=0.02, first_retry_s=0.05, most_retry_s=0.4),
)
SETTINGS = OperateSettings(
    cluster=ClusterSettings(
        engine_image="engine:1", router_image="router:1", operator_image="operator:1", operator_namespace="default"
    ),
    namespaces=(NAMESPACE,),
    identity="one",
    leader_election=False,
    host="127.0.0.1",
    port=0,
    timing=QUICK,
)


class SilentPods:
    """Pods that say nothing, unless the test says what."""

    def __init__(self) -> None:
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.pages: dict[str, bytes] = {}
        self.kv_engines: dict[str, KvEngineSeen] = {}
        self.told: Progress | None = None

    async def progress(self, ip: str) -> Progress | None:
        return self.told

    async def fleet_metrics(self, ip: str) -> Mapping[str, float] | None:
        return self.metrics.get(ip)

    async def kv_engine(self, name: str, ip: str) -> KvEngineSeen | None:
        return self.kv_engines.get(ip)

    async def router_page(self, ip: str) -> bytes | None:
        return self.pages.get(ip)


@dataclass(slots=True)
class Running:
    """An operator that runs, and what tests do to it."""

    operator: Operator
    metrics: OperatorMetrics
    task: asyncio.Task[None]
    stopping: asyncio.Event

    def value(self, sample: str, **labels: str) -> float:
        """Return a metric's value; 0 where it has none."""
        return self.metrics.registry.get_sample_value(f"pagefleet_operator_{sample}", labels) or 0.0

    async def kill(self) -> None:
        """End it where it is, as far as that can be done to a task: nothing is finished, nothing given back."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 120)


@dataclass(slots=True)
class World:
    """The API server with a namespace, and the operators that look at it."""

    api: KubeApi
    pods: SilentPods = field(default_factory=SilentPods)
    clock: Callable[[], float] = time.monotonic
    """Of the autoscaler."""
    lease_clock: Callable[[], float] = time.monotonic

    @contextlib.asynccontextmanager
    async def operator(
        self, settings: OperateSettings = SETTINGS, wrap: Callable[[Cluster], Cluster] = lambda cluster: cluster
    ) -> AsyncIterator[Running]:
        """Run an operator for the length of the block; `wrap` stands between it and the cluster."""
        configuration = Configuration(host=self.api.address)
        client, metrics = connect(configuration), OperatorMetrics()
        unfenced = KubeCluster(client, AlwaysLeads(), TokenBucket(1000, 1000), metrics)
        place = (settings.cluster.operator_namespace, settings.lease_name)
        election = (
            Leadership(unfenced, place, settings.identity, settings.timing.lease, self.lease_clock)
            if settings.leader_election
            else AlwaysLeads()
        )
        outside = Outside(
            cluster=wrap(KubeCluster(client, election, TokenBucket(1000, 1000), metrics)),
            election=election,
            pods=self.pods,
            credentials=lambda: credentials_of(configuration),
            metrics=metrics,
            clock=self.clock,
        )
        operator, stopping = Operator(settings, outside), asyncio.Event()
        running = Running(operator, metrics, asyncio.create_task(operator.run(stopping, lambda: None)), stopping)
        try:
            yield running
        finally:
            if not running.task.done():
                await running.stop()
            await client.close()

    def apply(self, name: str = "qwen", namespace: str = NAMESPACE, **spec: Any) -> dict[str, Any]:
        """Write an InferenceService as a person would."""
        kind = self.api.kind("InferenceService")
        document = {"metadata": {"name": name}, "spec": {"model": {"uri": "builtin://tiny"}, **spec}}
        found = self.api.store.find(kind, namespace, name)
        if found is None:
            return self.api.store.create(kind, namespace, document)
        return self.api.store.merge_patch(kind, namespace, name, {"spec": document["spec"]}, writer())

    async def tried(self, name: str) -> None:
        """Have a service serve, and then try out another revision, whose engines start for ever."""
        spec: dict[str, Any] = {"rollout": {"canary": {}}}
        self.apply(name, **spec)
        await until(lambda: self.find("Deployment", f"{name}-engine"))
        labels = self.get("Deployment", f"{name}-engine")["spec"]["template"]["metadata"]["labels"]
        status = {"podIP": "10.0.0.2", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.api.add("Pod", {"metadata": {"name": f"{name}-engine-1", "labels": labels}, "status": status}, NAMESPACE)
        await until(lambda: self.condition("EngineReady", name).get("reason") == "AllReady")
        self.apply(name, **spec, engine={"maxModelLen": 1024})
        await until(lambda: self.condition("Progressing", name).get("reason") == "Canary")

    def find(self, kind: str, name: str, namespace: str = NAMESPACE) -> dict[str, Any] | None:
        return self.api.store.find(self.api.kind(kind), namespace, name)

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> dict[str, Any]:
        return self.api.store.get(self.api.kind(kind), namespace, name)

    def patch(self, kind: str, name: str, patch: dict[str, Any], manager: str = "kubectl-edit") -> None:
        """Edit an object as somebody else."""
        self.api.store.merge_patch(self.api.kind(kind), NAMESPACE, name, patch, writer(manager))

    def delete(self, kind: str, name: str, namespace: str = NAMESPACE) -> None:
        self.api.store.delete(self.api.kind(kind), namespace, name)

    def condition(self, kind: str, name: str = "qwen", namespace: str = NAMESPACE) -> dict[str, str]:
        """Return a condition of an InferenceService's status; empty for none."""
        status = (self.find("InferenceService", name, namespace) or {}).get("status") or {}
        return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})

    def children(self, namespace: str = NAMESPACE) -> dict[tuple[str, str], dict[str, Any]]:
        """Return all that the operator made, by kind and name."""
        found = {}
        for (kind, where, name), entry in self.api.store._entries.items():
            if where == namespace and kind.name not in ("InferenceService", "Event", "Pod"):
                found[kind.name, name] = entry.document
        return found

    async def settled(self, quiet_s: float = 0.15) -> None:
        """Wait until nothing has been written for a moment."""
        count = -1
        while count != len(self.api.writes()):
            count = len(self.api.writes())
            await asyncio.sleep(quiet_s)


def writer(manager: str = "kubectl-edit") -> Write:
    return Write(manager=manager, content_type="application/merge-patch+json")


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for something to become true."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - looks at what has no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("did not happen") from None


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Run an API server with one namespace for the length of the block."""
    async with KubeApi() as api:
        api.add_namespace(NAMESPACE)
        yield World(api)


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    """Play a scenario in a world of its own."""

    async def in_world() -> None:
        async with world() as made:
            await scenario(made)

    asyncio.run(in_world())
