"""One look at one InferenceService, over a store without HTTP: killed at each write, refused, throttled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pagefleet_operator.apply.applier import Applier
from pagefleet_operator.errors import Refused, Throttled, Unavailable
from pagefleet_operator.handlers.announcer import Announcer
from pagefleet_operator.handlers.autoscaler import Autoscaler
from pagefleet_operator.handlers.cluster_view import ClusterView
from pagefleet_operator.handlers.event_reader import EventReader
from pagefleet_operator.handlers.live_numbers import LiveNumbers
from pagefleet_operator.handlers.observer import Observer, Sources
from pagefleet_operator.handlers.pod_http import KvAnswers
from pagefleet_operator.handlers.reconciler import GOING_LOOK_S, NEVER_S, NOT_READY_LOOK_S, Reconciler, Tools
from pagefleet_operator.handlers.status_writer import StatusWriter
from pagefleet_operator.render.drift import differences
from pagefleet_protocol.model_facts import DownloadResult, ModelFacts, Progress, encode_result

from tests.fakes.kube_operator import NAMESPACE, SETTINGS, SilentPods, writer
from tests.fakes.kube_store_cluster import KINDS, StoreCluster

KEY = (NAMESPACE, "qwen")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
FACTS = ModelFacts(
    revision="c0ffee",
    weights_bytes=1 << 30,
    num_files=4,
    architecture="llama",
    dtype="bfloat16",
    quantization="",
    num_layers=2,
    num_window_layers=0,
    window=0,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
)


class Bench:
    """A cluster and the operators of it, one after the other."""

    def __init__(self) -> None:
        self.cluster = StoreCluster()
        self.cluster.add_namespace(NAMESPACE)
        self.pods = SilentPods()
        self.clock = 0.0
        self.start()

    def start(self) -> None:
        """Begin anew, as after a crash: only the cluster remembers."""
        cluster, self.view = self.cluster, ClusterView()
        live = LiveNumbers(self.pods, self.view, lambda: NOW)
        self.scaling = Autoscaler(self.pods, self.view, lambda reason: None, lambda: self.clock)
        sources = Sources(
            view=self.view,
            cluster=cluster,
            events=EventReader(cluster),
            pods=self.pods,
            kv=KvAnswers(self.pods, lambda: self.clock),
            live=live,
            scaling=self.scaling,
            now=lambda: NOW,
        )
        self.reconciler = Reconciler(
            Tools(
                view=self.view,
                cluster=cluster,
                observer=Observer(sources),
                settings=SETTINGS.cluster,
                applier=Applier(cluster, differences),
                statuses=StatusWriter(cluster),
                announcer=Announcer(cluster, "one", lambda: NOW),
            )
        )

    def look(self) -> float | None:
        self.cluster.show(self.view)
        return asyncio.run(self.reconciler.reconcile(KEY))

    def apply(self, **spec: Any) -> None:
        kind = KINDS["InferenceService"]
        document = {"metadata": {"name": "qwen"}, "spec": {"model": {"uri": "builtin://tiny"}, **spec}}
        if self.cluster.store.find(kind, NAMESPACE, "qwen"):
            self.cluster.store.merge_patch(kind, NAMESPACE, "qwen", {"spec": document["spec"]}, writer())
        else:
            self.cluster.store.create(kind, NAMESPACE, document)

    def get(self, kind: str, name: str = "qwen") -> dict[str, Any]:
        return self.cluster.store.get(KINDS[kind], NAMESPACE, name)

    def objects(self) -> dict[tuple[str, str], Any]:
        """Return what the operator wrote, without what only the API server says."""
        found = {}
        for (kind, where, name), entry in self.cluster.store._entries.items():
            if where == NAMESPACE and kind.name != "Event":
                document = {**entry.document, "metadata": {**entry.document["metadata"]}}
                for field in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "ownerReferences"):
                    document["metadata"].pop(field, None)
                document.pop("status", None)
                if kind.name == "Secret":
                    document.pop("data")  # random
                found[kind.name, name] = document
        return found

    def condition(self, kind: str) -> dict[str, str]:
        return next(one for one in self.get("InferenceService")["status"]["conditions"] if one["type"] == kind)

    def writes(self) -> list[tuple[str, str, str]]:
        return [one for one in self.cluster.requests if one[0] not in ("get", "list", "discover")]

    def run_job(self, result: DownloadResult, exit_code: int = 0) -> str:
        """Have the model job's pod end; returns the Job's name."""
        job = next(name for kind, name in self.objects() if kind == "Job")
        labels = self.get("Job", job)["spec"]["template"]["metadata"]["labels"]
        pod = {"metadata": {"name": f"{job}-abcde", "labels": labels}}
        self.cluster.store.create(KINDS["Pod"], NAMESPACE, pod)
        said = encode_result(result).decode()
        state = {"terminated": {"exitCode": exit_code, "reason": "Completed", "message": said}}
        document = self.get("Pod", f"{job}-abcde")
        document["status"] = {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "download", "state": state, "restartCount": 0}],
        }
        write = writer()
        self.cluster.store.replace(KINDS["Pod"], NAMESPACE, pod["metadata"]["name"], document, _status(write))
        return job


def _status(write: Any) -> Any:
    from dataclasses import replace

    return replace(write, subresource="status")


@pytest.fixture
def bench() -> Bench:
    return Bench()


class Killed(BaseException):
    """The process ends here."""


def kill_at(number: int) -> Callable[[str, str, str], None]:
    """Return a gate that ends the process before its n-th write."""
    left = [number]

    def gate(verb: str, kind: str, name: str) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return gate


SPEC = {"model": {"uri": "hf://org/name"}, "cache": {"type": "pvc"}, "router": {"replicas": 2}}


def test_killed_at_each_write_the_next_operator_makes_the_same() -> None:
    undisturbed = Bench()
    undisturbed.apply(**SPEC)
    undisturbed.look()
    wanted, number = undisturbed.objects(), len(undisturbed.writes())
    assert number > 10
    for killed_before in range(number):
        bench = Bench()
        bench.apply(**SPEC)
        bench.cluster.gate = kill_at(killed_before)
        with pytest.raises(Killed):
            bench.look()
        bench.cluster.gate = lambda verb, kind, name: None
        bench.start()
        bench.look()
        assert bench.objects() == wanted, killed_before


def test_killed_at_each_write_of_an_edit_the_next_operator_makes_the_same() -> None:
    edit = {"replicas": 3, "expose": {"type": "Ingress", "host": "a.example.org"}, "router": {"policy": "least-load"}}
    undisturbed = Bench()
    undisturbed.apply()
    undisturbed.look()
    first = len(undisturbed.writes())
    undisturbed.reconciler.optional_kinds = frozenset({"Ingress"})
    undisturbed.apply(**edit)
    undisturbed.look()
    wanted, number = undisturbed.objects(), len(undisturbed.writes()) - first
    assert number >= 3
    for killed_before in range(number):
        bench = Bench()
        bench.apply()
        bench.look()
        bench.reconciler.optional_kinds = frozenset({"Ingress"})
        bench.apply(**edit)
        bench.cluster.gate = kill_at(killed_before)
        with pytest.raises(Killed):
            bench.look()
        bench.cluster.gate = lambda verb, kind, name: None
        bench.start()
        bench.reconciler.optional_kinds = frozenset({"Ingress"})
        bench.look()
        assert bench.objects() == wanted, killed_before


def test_a_second_look_writes_nothing(bench: Bench) -> None:
    bench.apply()
    bench.look()
    before = len(bench.writes())
    bench.look()
    bench.start()
    bench.look()
    assert len(bench.writes()) == before


def test_a_look_before_the_watch_told_of_the_one_before_writes_nothing_new(bench: Bench) -> None:
    bench.apply()
    bench.look()
    before = len(bench.writes())
    asyncio.run(bench.reconciler.reconcile(KEY))  # the view knows nothing of what was just made
    assert len(bench.writes()) == before


def test_what_the_job_found_out_is_kept_on_the_job_and_outlives_its_pod(bench: Bench) -> None:
    bench.apply(**SPEC)
    bench.look()
    assert ("Deployment", "qwen-engine") not in bench.objects()
    job = bench.run_job(DownloadResult(facts=FACTS))
    bench.look()
    assert "c0ffee" in bench.get("Job", job)["metadata"]["annotations"]["pagefleet.dev/facts"]
    assert ("Deployment", "qwen-engine") in bench.objects()
    bench.cluster.store.delete(KINDS["Pod"], NAMESPACE, f"{job}-abcde")
    bench.start()
    before = bench.objects()
    bench.look()
    assert bench.objects() == before
    assert bench.condition("ModelCached")["reason"] == "Cached"


def test_an_apply_of_the_job_leaves_what_it_found_out(bench: Bench) -> None:
    bench.apply(**SPEC)
    bench.look()
    job = bench.run_job(DownloadResult(facts=FACTS))
    bench.look()
    patch = {"metadata": {"labels": {"app.kubernetes.io/component": "else"}}}
    bench.cluster.store.merge_patch(KINDS["Job"], NAMESPACE, job, patch, writer())
    bench.look()
    metadata = bench.get("Job", job)["metadata"]
    assert metadata["labels"]["app.kubernetes.io/component"] == "model"
    assert "pagefleet.dev/facts" in metadata["annotations"]


def test_the_progress_of_a_download_is_told(bench: Bench) -> None:
    bench.apply(**SPEC)
    bench.look()
    job = next(name for kind, name in bench.objects() if kind == "Job")
    labels = bench.get("Job", job)["spec"]["template"]["metadata"]["labels"]
    bench.cluster.store.create(KINDS["Pod"], NAMESPACE, {"metadata": {"name": f"{job}-abcde", "labels": labels}})
    document = bench.get("Pod", f"{job}-abcde")
    document["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "download", "state": {"running": {}}, "restartCount": 0}],
    }
    bench.cluster.store.replace(KINDS["Pod"], NAMESPACE, f"{job}-abcde", document, _status(writer()))
    bench.pods.told = Progress("downloading", 42 << 20, 100 << 20, 1, 4)
    bench.look()
    assert bench.condition("ModelCached")["reason"] == "Downloading"
    assert "42" in bench.condition("ModelCached")["message"]


def test_what_is_refused_is_told_and_the_rest_is_made(bench: Bench) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        if kind == "PodDisruptionBudget":
            raise Refused("no budgets here", status=403, reason="Forbidden")

    bench.apply()
    bench.cluster.gate = gate
    with pytest.raises(Refused, match="no budgets here"):
        bench.look()
    assert bench.condition("Degraded")["reason"] == "ApplyRefused"
    assert "no budgets here" in bench.condition("Degraded")["message"]
    assert ("Deployment", "qwen-engine") in bench.objects()
    bench.cluster.gate = lambda verb, kind, name: None
    bench.look()
    assert bench.condition("Degraded")["reason"] == "AsWanted"


def test_a_kind_that_must_not_be_read_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    get = bench.cluster.get

    async def narrow(kind: Any, namespace: str, name: str) -> Any:
        if kind.kind == "Role":
            raise Refused("roles is forbidden", status=403, reason="Forbidden")
        return await get(kind, namespace, name)

    def gate(verb: str, kind: str, name: str) -> None:
        if kind == "Role":
            raise Refused("roles is forbidden", status=403, reason="Forbidden")

    bench.apply()
    monkeypatch.setattr(bench.cluster, "get", narrow)
    bench.cluster.gate = gate
    with pytest.raises(Refused):
        bench.look()
    assert "roles is forbidden" in bench.condition("Degraded")["message"]


def test_without_a_fleet_key_nothing_that_serves_is_replaced(bench: Bench) -> None:
    """As after an upgrade of the operator without its new right, or with a quota of Secrets used up."""

    def gate(verb: str, kind: str, name: str) -> None:
        if kind == "Secret":
            raise Refused("secrets is forbidden", status=403, reason="Forbidden")

    bench.apply(router={"kvEvents": False})
    bench.look()
    before = {name: bench.get("Deployment", name)["spec"] for kind, name in bench.objects() if kind == "Deployment"}
    bench.apply(router={"kvEvents": True})
    bench.cluster.gate = gate
    with pytest.raises(Refused, match="secrets is forbidden"):
        bench.look()
    assert len(before) == 2
    assert before == {name: bench.get("Deployment", name)["spec"] for name in before}
    assert "secrets is forbidden" in bench.condition("Degraded")["message"]
    bench.cluster.gate = lambda verb, kind, name: None
    bench.look()
    assert all(bench.get("Deployment", name)["spec"] != spec for name, spec in before.items())
    assert ("Secret", "qwen-fleet") in bench.objects()


@pytest.mark.parametrize("error", [Throttled("slowly", retry_after_s=3.0), Unavailable("away")])
def test_an_api_server_in_trouble_ends_the_look_at_once(bench: Bench, error: Exception) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        raise error

    bench.apply()
    bench.cluster.gate = gate
    with pytest.raises(type(error)):
        bench.look()
    assert len(bench.writes()) == 1


def test_a_service_in_a_going_namespace_is_left_without_error(bench: Bench) -> None:
    def gate(verb: str, kind: str, name: str) -> None:
        raise Refused(
            "unable to create new content in namespace apps because it is being terminated",
            status=403,
            reason="Forbidden",
        )

    bench.apply()
    bench.cluster.gate = gate
    assert bench.look() == GOING_LOOK_S


def test_a_service_that_is_gone_or_going_is_not_looked_at_again(bench: Bench) -> None:
    assert bench.look() is None
    bench.apply()
    bench.look()
    patch = {"metadata": {"finalizers": ["example.org/theirs"]}}
    bench.cluster.store.merge_patch(KINDS["InferenceService"], NAMESPACE, "qwen", patch, writer())
    bench.cluster.store.delete(KINDS["InferenceService"], NAMESPACE, "qwen")
    before = len(bench.writes())
    assert bench.look() == GOING_LOOK_S
    assert len(bench.writes()) == before


def test_the_next_look_depends_on_what_is_open(bench: Bench) -> None:
    bench.apply(replicas=-1)
    assert bench.look() == NEVER_S
    bench.apply(replicas=1)
    assert bench.look() == 30.0
    labels = bench.get("Deployment", "qwen-engine")["spec"]["template"]["metadata"]["labels"]
    bench.cluster.store.create(KINDS["Pod"], NAMESPACE, {"metadata": {"name": "qwen-engine-1", "labels": labels}})
    assert bench.look() == NOT_READY_LOOK_S


def test_events_of_a_pod_that_waits_reach_the_status(bench: Bench) -> None:
    bench.apply()
    bench.look()
    labels = bench.get("Deployment", "qwen-engine")["spec"]["template"]["metadata"]["labels"]
    pod = {"metadata": {"name": "qwen-engine-1", "labels": labels}, "spec": {"nodeName": "one"}}
    bench.cluster.store.create(KINDS["Pod"], NAMESPACE, pod)
    document = bench.get("Pod", "qwen-engine-1")
    waiting = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}
    document["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
    bench.cluster.store.replace(KINDS["Pod"], NAMESPACE, "qwen-engine-1", document, _status(writer()))
    event = {
        "metadata": {"name": "one"},
        "involvedObject": {"kind": "Pod", "name": "qwen-engine-1"},
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found',
        "lastTimestamp": "2026-11-21T11:59:55Z",
    }
    bench.cluster.store.create(KINDS["Event"], NAMESPACE, event)
    bench.look()
    assert bench.condition("EngineReady")["reason"] == "SecretMissing"


def test_events_about_a_claim_of_somebody_else_are_read_while_its_pod_waits(bench: Bench) -> None:
    bench.apply(model={"uri": "pvc://weights/qwen"})
    bench.look()
    asked = [name for verb, kind, name in bench.cluster.requests if (verb, kind) == ("list", "Event")]
    assert "weights" not in asked
    job = next(name for kind, name in bench.objects() if kind == "Job")
    labels = bench.get("Job", job)["spec"]["template"]["metadata"]["labels"]
    bench.cluster.store.create(KINDS["Pod"], NAMESPACE, {"metadata": {"name": f"{job}-abcde", "labels": labels}})
    bench.look()
    asked = [name for verb, kind, name in bench.cluster.requests if (verb, kind) == ("list", "Event")]
    assert "weights" in asked
