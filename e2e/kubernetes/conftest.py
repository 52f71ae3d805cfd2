"""The cluster that PAGEFLEET_E2E_KUBECONFIG names, its images, and a namespace for each test.

PAGEFLEET_E2E_ENGINE_IMAGE, PAGEFLEET_E2E_ROUTER_IMAGE and PAGEFLEET_E2E_OPERATOR_IMAGE name images that the nodes can
get. Without any of the four the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.kubernetes.cluster import Cluster, Images
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.service import API_VERSION, KIND, Service
from e2e.kubernetes.tunnel import ServiceTunnel

FLEET: Mapping[str, Any] = {
    "replicas": 2,
    # Threads that spin for each other starve on a shared machine.
    "engine": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
    "router": {"replicas": 2, "resources": {"cpu": "50m", "memory": "256Mi"}},
    "resources": {"cpu": "100m"},
    "rollout": {"drainSeconds": 20},
}


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    """The administrator's kubeconfig."""
    path = os.environ.get("PAGEFLEET_E2E_KUBECONFIG")
    if not path:
        pytest.skip("PAGEFLEET_E2E_KUBECONFIG names no cluster")
    return Path(path)


@pytest.fixture(scope="session")
def images() -> Images:
    names = {part: os.environ.get(f"PAGEFLEET_E2E_{part.upper()}_IMAGE", "") for part in Images.__slots__}
    if absent := [f"PAGEFLEET_E2E_{part.upper()}_IMAGE" for part, name in names.items() if not name]:
        pytest.skip(f"{' and '.join(absent)} must name images that the cluster's nodes can get")
    return Images(**names)


@pytest.fixture(scope="session")
def cluster(kubeconfig: Path) -> Iterator[Cluster]:
    reached = Cluster(kubeconfig)
    yield reached
    reached.close()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace that admits `restricted` pods only."""
    with cluster.new_namespace() as name:
        yield name


@pytest.fixture
def service_url(cluster: Cluster, images: Images, namespace: str) -> Iterator[Callable[..., str]]:
    """`service_url(host, port=80)` returns a URL on loopback that leads through the cluster's Service of that name."""
    with ExitStack() as open_tunnels:

        def open_tunnel(host: str, port: int = 80) -> str:
            return open_tunnels.enter_context(ServiceTunnel(cluster, images.operator, namespace, host, port)).url

        yield open_tunnel


@pytest.fixture(scope="session")
def namespaces(cluster: Cluster, images: Images) -> Iterator[tuple[str, str, str]]:
    """Three `restricted` namespaces: the release's, one more that it serves, and one that will be deleted."""
    with cluster.new_namespace() as first, cluster.new_namespace() as second, cluster.new_namespace() as third:
        yield first, second, third


@pytest.fixture(scope="session")
def installation(cluster: Cluster, images: Images, namespaces: tuple[str, str, str]) -> Iterator[Installation]:
    """The chart, installed once for the whole session."""
    installed = Installation(cluster, images, namespaces)
    installed.install()
    yield installed
    for name in namespaces:
        for service in cluster.list(API_VERSION, KIND, name):
            cluster.delete(API_VERSION, KIND, service["metadata"]["name"], name)
    installed.uninstall()
    installed.close()


@pytest.fixture(scope="session")
def served(cluster: Cluster, installation: Installation) -> Service:
    """One engine behind one router: the five lines. Wait until it is ready, each test may have changed it."""
    service = Service(cluster, installation.namespace, "tiny")
    service.apply()
    return service


@pytest.fixture(scope="session")
def session_fleet(cluster: Cluster, installation: Installation) -> Service:
    return Service(cluster, installation.namespace, "fleet")


@pytest.fixture
def fleet(session_fleet: Service) -> Service:
    """Two engines behind two routers, all ready; a rollout back to where they were would take a minute."""
    if not session_fleet.is_settled or session_fleet.spec["replicas"] != FLEET["replicas"]:
        session_fleet.apply(**FLEET)
        session_fleet.wait_until_settled()
    return session_fleet


@pytest.fixture
def load(cluster: Cluster, images: Images, fleet: Service) -> Iterator[Load]:
    """Requests to `fleet` that never pause."""
    with Load(cluster, images.operator, fleet) as running:
        yield running


@pytest.fixture(scope="session")
def privileged(cluster: Cluster) -> Iterator[str]:
    """A namespace whose pods may do to the node what they like."""
    with cluster.new_namespace("privileged") as name:
        yield name
