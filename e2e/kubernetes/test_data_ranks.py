"""An engine of two data ranks in one pod: two ports in EndpointSlices, two engines for routers, one lost alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pagefleet_protocol import headers
from pagefleet_protocol.kube_names import rank_id

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.conftest import FLEET
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.node import kill_processes
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_exact_prefix import metric
from e2e.kubernetes.tunnel import PodTunnel

PATIENCE_S = 240
"""Four engines' processes start on a small node."""
RANKED: Mapping[str, Any] = {
    **FLEET,
    "replicas": 1,
    "parallelism": {"data": 2},
    "router": {**FLEET["router"], "replicas": 1},
}
READY = r"pagefleet_router_endpoints\{state=\"ready\"\}"


@pytest.fixture(scope="module")
def ranked(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    service = Service(cluster, installation.namespace, "ranked")
    service.apply(**RANKED)
    service.wait_until_settled(PATIENCE_S)
    yield service
    service.delete()
    wait_until(lambda: not service.pods("engine"), "its engines are gone", PATIENCE_S)


@pytest.fixture
def router(cluster: Cluster, ranked: Service) -> Iterator[str]:
    """The address of its router."""
    (name,) = ranked.pod_names("router")
    with PodTunnel(cluster, ranked.namespace, name) as tunnel:
        yield tunnel.url


def ports_of(cluster: Cluster, service: Service) -> list[dict[str, int]]:
    """Return the ports, by their names, of each EndpointSlice that names a pod."""
    labels = f"kubernetes.io/service-name={service.name}-engine"
    found = cluster.list("discovery.k8s.io/v1", "EndpointSlice", service.namespace, labels)
    return [{one["name"]: one["port"] for one in each["ports"] or ()} for each in found if each.get("endpoints")]


def answering(url: str, model: str, times: int = 8) -> set[str]:
    """Return which engines answer prompts that share nothing and come at once."""

    def ask(number: int) -> str:
        body = {"model": model, "prompt": f"{number} pages", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        return str(reply.headers[headers.ENGINE_ID])

    with ThreadPoolExecutor(times) as pool:
        return set(pool.map(ask, range(times)))


def both(pod: str) -> set[str]:
    return {rank_id(pod, rank) for rank in range(2)}


def test_each_rank_is_a_port_of_the_slices_and_an_engine_of_the_router(
    cluster: Cluster, ranked: Service, router: str
) -> None:
    (pod,) = ranked.pod_names("engine")
    assert ports_of(cluster, ranked) == [{"http": 8000, "http-1": 8001}]
    wait_until(lambda: metric(router, READY) == 2, "the router knows both")
    wait_until(lambda: metric(router, "pagefleet_router_kv_engines_followed") == 2, "and hears both")
    wait_until(lambda: answering(router, ranked.name) == both(pod), "both answer")
    resolved = ranked.status["resolved"]
    assert (resolved["data"], ranked.role("engine")["ready"]) == (2, 1), "one engine for who counts replicas"


def test_a_rank_that_is_killed_starts_again_in_its_pod_and_costs_no_answer(
    cluster: Cluster, images: Images, privileged: str, ranked: Service, router: str
) -> None:
    (before,) = ranked.pods("engine")
    with Load(cluster, images.operator, ranked) as load, ThreadPoolExecutor(1) as pool:
        # On an idle machine the rank is there again before the pod that killed it has ended.
        missed = pool.submit(wait_until, lambda: metric(router, READY) == 1, "the router misses one")
        kill_processes(cluster, images.operator, privileged, before, "child")
        missed.result()
        load.go_on()
        wait_until(lambda: metric(router, READY) == 2, "the rank is there again", PATIENCE_S)
        assert load.go_on().failures == ()
    (after,) = ranked.pods("engine")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert [one["restartCount"] for one in after["status"]["containerStatuses"]] == [0]
    name = after["metadata"]["name"]
    wait_until(lambda: answering(router, ranked.name) == both(name), "both ranks answer again")


def test_another_number_of_ranks_is_a_rollout_that_loses_nothing(
    cluster: Cluster, images: Images, ranked: Service, router: str
) -> None:
    """Meanwhile pods with two ports and with one are behind the same Service."""
    (before,) = ranked.pod_names("engine")
    with Load(cluster, images.operator, ranked) as load:
        ranked.edit(parallelism={"data": 1})
        ranked.wait_for("Progressing", "RollingOut")
        wait_until(lambda: before not in ranked.pod_names("engine"), "the old engine leaves", PATIENCE_S)
        ranked.wait_until_settled(PATIENCE_S)
        wait_until(lambda: ports_of(cluster, ranked) == [{"http": 8000}], "one port is left", PATIENCE_S)
        assert load.go_on().failures == ()
    wait_until(lambda: metric(router, READY) == 1, "the router knows one")
    assert answering(router, ranked.name, 4) == ranked.pod_names("engine")
