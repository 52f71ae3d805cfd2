"""InferenceServices, observations, and a cluster of dicts whose controllers do their work in steps. No test in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pagefleet_operator.plan.canary import TrialFigures, step_of
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import (
    DOWNLOAD,
    Child,
    ChildKey,
    ContainerSeen,
    EventSeen,
    Observed,
    PodSeen,
    ScalingSeen,
)
from pagefleet_operator.plan.obstacles import key_of
from pagefleet_operator.plan.pair_ratio import PairLoad
from pagefleet_operator.plan.verdict import find_condition
from pagefleet_operator.render.service_plan import ServicePlan, plan_service
from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import Condition, ConditionType, InferenceServiceStatus, PairRole
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_REVISION, LABEL_ROLE
from pagefleet_protocol.model_facts import DownloadResult, ModelFacts, encode_result
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

from tests.fakes import plan_inputs

GIB = 1024**3
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
UID, COMMIT, FACTS = plan_inputs.UID, plan_inputs.COMMIT, plan_inputs.FACTS
SETTINGS = replace(plan_inputs.SETTINGS, allowed_host_path=("/var/models",))
HF = {"model": {"uri": "hf://org/model"}}


def service(name: str = "qwen", /, **spec: Any) -> InferenceService:
    """Return an InferenceService of namespace ns."""
    return parse_inference_service(
        {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "ns", "uid": UID},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
        }
    )


def profile(name: str = "h100", **spec: Any) -> InferenceProfile:
    """Return a profile for H100 GPUs, unless told otherwise."""
    return parse_inference_profile(
        {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "InferenceProfile",
            "metadata": {"name": name},
            "spec": {"gpuType": "h100", "gpuMemory": "80Gi", **spec},
        }
    )


def condition(status: InferenceServiceStatus, kind: ConditionType) -> Condition:
    """Return a condition that has to be there."""
    found = find_condition(status, kind)
    assert found is not None
    return found


def told(status: InferenceServiceStatus, kind: ConditionType) -> tuple[str, str]:
    """Return status and reason of a condition."""
    found = condition(status, kind)
    return found.status, found.reason


def container(name: str = "engine", **seen: Any) -> ContainerSeen:
    """Return a container that runs, unless told otherwise."""
    return ContainerSeen(**{"name": name, "state": "running", **seen})


def pod(name: str = "qwen-engine-a", **seen: Any) -> PodSeen:
    """Return an engine's pod on node n1 that runs and is not ready, unless told otherwise."""
    component = "router" if "router" in name else "model" if "model" in name else "engine"
    given: dict[str, Any] = {
        "name": name,
        "component": component,
        "revision": "new",
        "phase": "Running",
        "node": "n1",
        "created": NOW - timedelta(minutes=5),
        "containers": (container(DOWNLOAD if component == "model" else component),),
    }
    return PodSeen(**(given | seen))


def event(reason: str, message: str, name: str = "qwen-engine-a", kind: str = "Pod") -> EventSeen:
    """Return an event about a pod, of a moment ago."""
    return EventSeen(kind, name, reason, message, NOW - timedelta(seconds=5))


def result(reason: Any = "", message: str = "", facts: ModelFacts | None = None) -> str:
    """Return the last words of a download."""
    return encode_result(DownloadResult(facts=facts, reason=reason, message=message)).decode()


def owner_of(one: PodSeen) -> str:
    """Return the name of a pod's Deployment."""
    return one.name.rpartition("-")[0]


Broken = Callable[[PodSeen], PodSeen]


@dataclass
class World:
    """A namespace. `plan` and `apply` are the operator's part, `work` the controllers' and kubelets'."""

    service: InferenceService
    profiles: Mapping[str, InferenceProfile] = field(default_factory=dict)
    facts: ModelFacts = FACTS
    optional_kinds: frozenset[str] = frozenset({"Ingress", "HTTPRoute", "InferencePool", "ServiceMonitor"})
    children: dict[ChildKey, dict[str, Any]] = field(default_factory=dict)
    strangers: dict[ChildKey, dict[str, Any]] = field(default_factory=dict)
    pods: list[PodSeen] = field(default_factory=list)
    events: tuple[EventSeen, ...] = ()
    status: InferenceServiceStatus | None = None
    now: datetime = NOW
    breaks: Mapping[str, Broken] = field(default_factory=dict)
    """Revision -> what becomes of its pods instead of being ready."""
    scaling: ScalingSeen | None = None
    """The autoscaler's decision."""
    role_scaling: Mapping[PairRole, ScalingSeen] = field(default_factory=dict)
    kv_engines: tuple[KvEngineSeen, ...] = ()
    pair_load: PairLoad | None = None
    trial: TrialFigures | None = None
    """What routers count of a revision that is tried out, in each step."""
    devices: int | None = None
    """For engines, one each; None: as many as they want. Without one an engine's pod is never ready."""
    born: int = 0
    settings: ClusterSettings = SETTINGS

    def observed(self) -> Observed:
        """Return what an operator sees."""
        ours = {key: Child(body=body, ours=True) for key, body in self.children.items()}
        return Observed(
            now=self.now,
            children=ours | {key: Child(body=body, ours=False) for key, body in self.strangers.items()},
            pods=tuple(self.pods),
            events=self.events,
            profiles=self.profiles,
            optional_kinds=self.optional_kinds,
            scaling=self.scaling,
            role_scaling=self.role_scaling,
            kv_engines=self.kv_engines,
            pair_load=self.pair_load,
            trial=replace(self.trial, step=step_of(self.status.canary if self.status else None))
            if self.trial
            else None,
        )

    def plan(self) -> ServicePlan:
        """Return the plan for what is now."""
        return plan_service(self.service, self.status, self.observed(), self.settings)

    def step(self) -> bool:
        """Plan, do it, let the controllers work for ten seconds; return whether anything changed."""
        plan = self.plan()
        before = self._snapshot()
        self.status = plan.status
        for key in plan.delete:
            del self.children[key]
        for body in plan.objects:
            kept = self.children.get(key_of(body), {}).get("status")
            self.children[key_of(body)] = body | ({"status": kept} if kept else {})
        self._work()
        self.now += timedelta(seconds=10)
        return self._snapshot() != before

    def settle(self, most: int = 60) -> InferenceServiceStatus:
        """Go on until nothing changes any more; fail when that never comes."""
        for _ in range(most):
            if not self.step():
                assert self.status is not None
                return self.status
        raise AssertionError(f"nothing settled: {self.status}")

    def edit(self, **spec: Any) -> None:
        """Replace the spec."""
        self.service = service(self.service.name, **spec)

    def of(self, component: str) -> list[PodSeen]:
        """Return the pods of one component."""
        return [one for one in self.pods if one.component == component]

    def _snapshot(self) -> str:
        status = self.status.model_dump(exclude={"conditions": {"__all__": {"message"}}}) if self.status else None
        return repr((self.children, [replace(one, created=None, turned=None) for one in self.pods], status))

    def _work(self) -> None:
        jobs = {name for kind, name in self.children if kind == "Job"}
        self.pods = [one for one in self.pods if one.component != "model" or one.name.rpartition("-")[0] in jobs]
        revisions = {body["metadata"]["labels"].get(LABEL_REVISION) for body in self.children.values()}
        owners = {name for kind, name in self.children if kind == "Deployment"}
        self.pods = [
            one
            for one in self.pods
            if one.component != "engine" or (one.revision in revisions if one.role else owner_of(one) in owners)
        ]  # what the garbage collector leaves
        for (kind, name), body in list(self.children.items()):
            if kind == "Job":
                self._run_job(name, body)
            elif kind == "Deployment":
                self._roll(name, body)

    def _run_job(self, name: str, body: dict[str, Any]) -> None:
        revision = body["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
        pod_name = f"{name}-1"
        running = next((one for one in self.pods if one.name == pod_name), None)
        if running is None:
            self.pods.append(pod(pod_name, revision=revision, created=self.now))
        elif running.phase == "Running":
            ended = container(DOWNLOAD, state="terminated", exit_code=0, message=result(facts=self.facts))
            self._replace(running, replace(running, phase="Succeeded", containers=(ended,)))
            done = {"type": "Complete", "status": "True", "lastTransitionTime": self.now.isoformat()}
            body["status"] = {"conditions": [done]}

    def _roll(self, name: str, body: dict[str, Any]) -> None:
        """Do what a Deployment's controller does: as fast as surge and availability allow."""
        labels, spec = body["spec"]["template"]["metadata"]["labels"], body["spec"]
        component, revision, wanted = labels[LABEL_COMPONENT], labels[LABEL_REVISION], spec["replicas"]
        limits = spec["strategy"]["rollingUpdate"]
        role = labels.get(LABEL_ROLE)

        def mine() -> list[PodSeen]:
            # Of a part, and of what is tried out, every revision has a Deployment of its own.
            those = [one for one in self.of(component) if one.role == role]
            return [one for one in those if (one.revision == revision if role else owner_of(one) == name)]

        for one in mine():
            broken = self.breaks.get(one.revision)
            placed = component != "engine" or self.devices is None or self._num_serving() < self.devices
            if not one.ready and placed:
                self._replace(one, broken(one) if broken else replace(one, ready=True, turned=self.now))
        old = [one for one in mine() if one.revision != revision]
        new = [one for one in mine() if one.revision == revision]
        idle = [one for one in old if not one.ready]
        spare = sum(one.ready for one in mine()) - (wanted - limits["maxUnavailable"])
        going = [*idle, *[one for one in old if one.ready][: max(0, spare)], *new[wanted:]]
        self.pods = [one for one in self.pods if one not in going]
        room = wanted + limits["maxSurge"] - len(mine())
        for _ in range(max(0, min(room, wanted - len(new)))):
            self.born += 1
            born = pod(f"{name}-{self.born}", component=component, revision=revision, created=self.now)
            self.pods.append(replace(born, role=role))
        updated = [one for one in mine() if one.revision == revision]
        body["status"] = {
            "availableReplicas": sum(one.ready for one in updated),
            "updatedReplicas": len(updated),
            "replicas": len(mine()),
        }

    def _num_serving(self) -> int:
        return sum(one.ready for one in self.of("engine"))

    def _replace(self, old: PodSeen, new: PodSeen) -> None:
        self.pods[self.pods.index(old)] = new
