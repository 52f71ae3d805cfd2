"""The operator with many InferenceServices: memory, a restart until all is as wanted, time until an edit takes effect.

A real API server and etcd run here; controllers and nodes are played: Deployments get the pods and the status that they
would have, all ready. Needs Kubernetes' binaries in KUBEBUILDER_ASSETS.

python bench/operator_scale.py --services 1000 --json bench/results/operator_scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.report import write_report
from tests.fakes.free_ports import free_ports
from tests.fakes.kube_control_plane import ControlPlane, apply, binaries_folder, missing

SERVICES = "/apis/pagefleet.dev/v1alpha1"
PER_NAMESPACE = 100
PARALLEL = 24
NUM_EDITS = 100
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class World:
    """What the parts of this benchmark share."""

    api: httpx.AsyncClient
    num_services: int
    engines: int

    @property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(f"team-{number}" for number in range(-(-self.num_services // PER_NAMESPACE)))

    def services(self) -> Iterable[tuple[str, str]]:
        """Namespace and name of each."""
        for number in range(self.num_services):
            yield self.namespaces[number // PER_NAMESPACE], f"model-{number}"


async def in_parallel(calls: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Run all of them, `PARALLEL` at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


async def send(api: httpx.AsyncClient, method: str, path: str, body: Any, merge: bool = False) -> None:
    """One write that has to succeed."""
    headers = {"content-type": "application/merge-patch+json"} if merge else {}
    answer = await api.request(method, path, json=body, headers=headers)
    if answer.is_error:
        raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text[:300]}")


def service_document(name: str, engines: int) -> dict[str, Any]:
    return {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "builtin://tiny"}, "replicas": engines},
    }


async def create_services(world: World) -> None:
    post = partial(send, world.api, "POST")
    await in_parallel([partial(post, "/api/v1/namespaces", {"metadata": {"name": name}}) for name in world.namespaces])
    account = {"metadata": {"name": "default"}}  # a controller would make it
    await in_parallel(
        [partial(post, f"/api/v1/namespaces/{name}/serviceaccounts", account) for name in world.namespaces]
    )
    await in_parallel(
        [
            partial(post, f"{SERVICES}/namespaces/{where}/inferenceservices", service_document(name, world.engines))
            for where, name in world.services()
        ]
    )


async def items(api: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    """All objects of a kind in the whole cluster."""
    found: list[dict[str, Any]] = (await api.get(path)).raise_for_status().json()["items"]
    return found


async def play_controllers(world: World) -> int:
    """Give each Deployment its pods and its status, all ready. Returns the number of pods."""
    deployments = await items(world.api, "/apis/apps/v1/deployments")
    calls: list[Callable[[], Awaitable[Any]]] = []
    num_pods = 0
    for deployment in deployments:
        for number in range(deployment["spec"]["replicas"]):
            calls.append(partial(play_pod, world.api, deployment, number, num_pods))
            num_pods += 1
        calls.append(partial(play_rollout, world.api, deployment))
    await in_parallel(calls)
    return num_pods


async def play_pod(api: httpx.AsyncClient, deployment: dict[str, Any], number: int, address: int) -> None:
    metadata, template = deployment["metadata"], deployment["spec"]["template"]
    name, where = f"{metadata['name']}-{number}", metadata["namespace"]
    pods = f"/api/v1/namespaces/{where}/pods"
    # Without volumes and accounts: no controller is there to provide them.
    containers = [{"name": one["name"], "image": one["image"]} for one in template["spec"]["containers"]]
    body = {
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": {"containers": containers, "nodeName": "played", "automountServiceAccountToken": False},
    }
    await send(api, "POST", pods, body)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = {
        "phase": "Running",
        "podIP": f"127.{1 + address // 65536}.{address // 256 % 256}.{address % 256}",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [
            {
                "name": one["name"],
                "image": one["image"],
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
            for one in containers
        ],
    }
    await send(api, "PATCH", f"{pods}/{name}/status", {"status": status}, merge=True)


async def play_rollout(api: httpx.AsyncClient, deployment: dict[str, Any]) -> None:
    metadata, replicas = deployment["metadata"], deployment["spec"]["replicas"]
    counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), replicas)
    status = {**counts, "observedGeneration": metadata["generation"]}
    path = f"/apis/apps/v1/namespaces/{metadata['namespace']}/deployments/{metadata['name']}/status"
    await send(api, "PATCH", path, {"status": status}, merge=True)


async def num_ready(world: World) -> int:
    services = await items(world.api, f"{SERVICES}/inferenceservices")
    conditions = [(one.get("status") or {}).get("conditions") or [] for one in services]
    return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in some) for some in conditions)


async def num_deployments(world: World) -> int:
    return len(await items(world.api, "/apis/apps/v1/deployments"))


class Operator:
    """One `pagefleet operate` and what it says of itself."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.port = free_ports()
        self._log = log.open("ab")
        images = [f"--{role}-image=localhost/{role}:bench" for role in ("engine", "router", "operator")]
        command = [
            str(Path(sys.executable).with_name("pagefleet")),
            "operate",
            "--kubeconfig",
            str(kubeconfig),
            *images,
        ]
        command += ["--operator-namespace", "pagefleet-system", "--no-leader-election", "--port", str(self.port)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.peak_mib = 0.0

    def metrics(self) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30, trust_env=False).text
        except httpx.HTTPError:
            return ""

    def metric(self, name: str) -> float:
        """Sum over all labels; 0 while it is not there."""
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(map(float, found))

    def memory_mib(self) -> float:
        """Resident memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        assert found is not None
        assert peak is not None
        self.peak_mib = int(peak[1]) / 1024
        return int(found[1]) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()


async def until(what: str, look: Callable[[], Awaitable[bool]], pause_s: float = 0.5) -> float:
    """Poll. Returns the seconds that it took."""
    started = time.monotonic()
    while not await look():
        if time.monotonic() - started > TIMEOUT_S:
            raise SystemExit(f"not after {TIMEOUT_S:g} s: {what}")
        await asyncio.sleep(pause_s)
    return time.monotonic() - started


async def converged(operator: Operator, num_services: int) -> bool:
    """Whether each service has been looked at, and none waits to be."""
    done = operator.metric("pagefleet_operator_reconcile_seconds_count")
    return done >= num_services and operator.metric("pagefleet_operator_queue_depth") == 0


async def edit_seconds(world: World) -> list[float]:
    """Edit one service after the other; for each the time until its Deployment says the same."""
    random_services = random.Random(7).sample(list(world.services()), min(NUM_EDITS, world.num_services))
    taken = []
    for where, name in random_services:
        replicas = world.engines + 1
        started = time.perf_counter()
        path = f"{SERVICES}/namespaces/{where}/inferenceservices/{name}"
        await send(world.api, "PATCH", path, {"spec": {"replicas": replicas}}, merge=True)
        deployment = f"/apis/apps/v1/namespaces/{where}/deployments/{name}-engine"
        await until("the Deployment follows", partial(has_replicas, world.api, deployment, replicas), 0.005)
        taken.append(time.perf_counter() - started)
    return taken


async def has_replicas(api: httpx.AsyncClient, deployment: str, replicas: int) -> bool:
    return bool((await api.get(deployment)).json()["spec"]["replicas"] == replicas)


async def measure(world: World, kubeconfig: Path, log: Path) -> dict[str, Any]:
    await create_services(world)
    print(f"{world.num_services} InferenceServices exist", flush=True)
    operator = Operator(kubeconfig, log)
    try:

        async def all_made() -> bool:
            return await num_deployments(world) == 2 * world.num_services

        first = await until("all Deployments exist", all_made, 2)
        print(f"first convergence {first:.1f} s, {operator.memory_mib():.0f} MiB", flush=True)
        num_pods = await play_controllers(world)

        async def all_ready() -> bool:
            return await num_ready(world) == world.num_services

        await until("all are Ready", all_ready, 2)
        print(f"{num_pods} pods, all Ready, {operator.memory_mib():.0f} MiB", flush=True)
        first_peak = operator.peak_mib
        operator.kill()
        operator = Operator(kubeconfig, log)
        restart = await until("converged", lambda: converged(operator, world.num_services))
        restart_mib, restart_cpu = operator.memory_mib(), operator.cpu_seconds()
        writes = operator.metric("pagefleet_operator_applies_total")
        print(f"restart {restart:.1f} s, {restart_mib:.0f} MiB, {writes:.0f} applies", flush=True)
        edits = sorted(await edit_seconds(world))
        cpu, began = operator.cpu_seconds(), time.monotonic()
        await asyncio.sleep(60)
        idle = (operator.cpu_seconds() - cpu) / (time.monotonic() - began)
        return {
            "services": world.num_services,
            "pods": num_pods,
            "first_convergence_s": round(first, 1),
            "first_peak_mib": round(first_peak),
            "restart_to_converged_s": round(restart, 1),
            "restart_cpu_s": round(restart_cpu, 1),
            "restart_applies": int(writes),
            "memory_mib": round(operator.memory_mib()),
            "restart_peak_mib": round(operator.peak_mib),
            "edit_to_deployment_p50_s": round(statistics.median(edits), 3),
            "edit_to_deployment_p95_s": round(edits[int(0.95 * (len(edits) - 1))], 3),
            "reconcile_p95_s": reconcile_p95(operator.metrics()),
            "idle_cores": round(idle, 3),
        }
    finally:
        operator.kill()


def reconcile_p95(metrics: str) -> float | None:
    """Upper bound of the histogram's bucket that holds the 95th percentile, seconds."""
    pattern = r'^pagefleet_operator_reconcile_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$'
    counts: dict[float, float] = {}
    for bound, count in re.findall(pattern, metrics, re.MULTILINE):
        counts[float(bound)] = counts.get(float(bound), 0) + float(count)
    total = max(counts.values(), default=0)
    return next((bound for bound in sorted(counts) if counts[bound] >= 0.95 * total), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=4, help="engine pods of each; there is one router beside them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if reason := missing(binaries_folder()):
        print(f"cannot measure: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plane_folder = folder / "control-plane"
        plane_folder.mkdir()
        with ControlPlane(plane_folder, binaries_folder(), (), disabled_admission=["ServiceAccount"]) as plane:
            with plane.client() as admin:
                for path in sorted((HERE.parent / "crds").glob("*.yaml")):
                    definition = yaml.safe_load(path.read_text())
                    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                    apply(admin, f"{crds}/{definition['metadata']['name']}", definition).raise_for_status()
                while admin.get(f"{SERVICES}/inferenceservices").is_error:
                    time.sleep(0.2)
            kubeconfig = plane.write_kubeconfig(folder / "kubeconfig")
            figures = asyncio.run(run(plane, arguments, kubeconfig, folder / "operator.log"))
    for name, value in figures.items():
        print(f"{name:<28}{value}")
    if arguments.json:
        write_report(arguments.json, "operator_scale", figures)
    return 0


async def run(plane: ControlPlane, arguments: argparse.Namespace, kubeconfig: Path, log: Path) -> dict[str, Any]:
    async with httpx.AsyncClient(
        base_url=plane.url,
        verify=ssl.create_default_context(cafile=str(plane.ca_file)),
        headers={"Authorization": f"Bearer {plane.admin_token}"},
        timeout=120,
        trust_env=False,
    ) as api:
        return await measure(World(api, arguments.services, arguments.engines), kubeconfig, log)


if __name__ == "__main__":
    raise SystemExit(main())
