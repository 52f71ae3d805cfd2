"""The cluster that PAGEFLEET_E2E_KUBECONFIG names, its images, and a namespace for each test.

PAGEFLEET_E2E_ENGINE_IMAGE, PAGEFLEET_E2E_ROUTER_IMAGE and PAGEFLEET_E2E_OPERATOR_IMAGE name images that the nodes can
get. Without any of the four the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.kubernetes.cluster import Cluster, Images
from e2e.kubernetes.tunnel import ServiceTunnel


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
