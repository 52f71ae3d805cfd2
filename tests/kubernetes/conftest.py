"""A real API server for the whole session, a namespace for each test; skips where the binaries are absent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from tests.fakes.kube_control_plane import ControlPlane, apply, binaries_folder, missing, wait_until

CRDS = Path(__file__).parents[2] / "crds"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The session's API server; a test that takes it away brings it back."""
    binaries = binaries_folder()
    if reason := missing(binaries):
        pytest.skip(reason)
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), binaries) as running:
        yield running


@pytest.fixture(scope="session")
def admin(control_plane: ControlPlane) -> Iterator[httpx.Client]:
    """The administrator's HTTP client."""
    with control_plane.client() as client:
        yield client


@pytest.fixture(scope="session")
def established(admin: httpx.Client) -> tuple[str, ...]:
    """The names of our resources, once the API server serves them."""
    names = []
    for path in sorted(CRDS.glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        names.append(str(definition["metadata"]["name"]))
        answer = apply(admin, f"{CRD_PATH}/{names[-1]}", definition)
        assert answer.status_code in (200, 201), answer.text
    for name in names:
        wait_until(partial(is_established, admin, name))
    return tuple(names)


@pytest.fixture(scope="session")
def namespace_names() -> Iterator[str]:
    return (f"test-{number}" for number in itertools.count(1))


@pytest.fixture
def namespace(admin: httpx.Client, namespace_names: Iterator[str]) -> Iterator[str]:
    """A namespace of the test's own; it is let go of, not waited for."""
    name = next(namespace_names)
    admin.post("/api/v1/namespaces", json={"metadata": {"name": name}}).raise_for_status()
    yield name
    admin.delete(f"/api/v1/namespaces/{name}").raise_for_status()


def is_established(client: httpx.Client, name: str) -> bool:
    conditions = client.get(f"{CRD_PATH}/{name}").json().get("status", {}).get("conditions")
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions or [])
