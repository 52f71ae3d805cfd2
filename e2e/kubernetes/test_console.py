"""The browser console of a service: what its router shows in a cluster, and `pagefleet console` from outside."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

import httpx
import pytest
from kubernetes import client
from pagefleet_protocol.console_state import STATE_PATH, ConsoleState, decode_state
from pagefleet_protocol.kube_names import LABEL_REVISION

from e2e.kubernetes.cluster import Cluster, wait_until
from e2e.kubernetes.conftest import FLEET
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.service import Service

ENDS_WITHIN_S = 10
SCALING = {"min": 1, "max": 2, "target": {"queue": 4}}


class Console:
    """`pagefleet console` as a process, with the administrator's kubeconfig."""

    def __init__(self, service: Service) -> None:
        command = [sys.executable, "-m", "pagefleet_operator.console_cli", service.name, "-n", service.namespace]
        command += ["--kubeconfig", str(service.cluster.kubeconfig), "--port", "0", "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = _line(self.process.stdout)
        assert said.startswith(f"{service.name}: the console is at http://127.0.0.1:"), self.stop()
        self.url = said.split()[5].rstrip("/,")

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, trust_env=False)

    def state(self) -> ConsoleState:
        return decode_state(self.get(STATE_PATH).content)

    def stop(self) -> tuple[int, str]:
        """Do as Ctrl-C does; returns the status and what was complained of."""
        self.process.send_signal(signal.SIGINT)
        try:
            _, complaint = self.process.communicate(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, complaint


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    ready, _, _ = select.select([stream], [], [], 60)
    return stream.readline() if ready else ""


@pytest.fixture(scope="module")
def shown(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    service = Service(cluster, installation.namespace, "shown")
    spec = {name: value for name, value in FLEET.items() if name != "replicas"}
    service.apply(**spec, autoscaling=SCALING)
    service.wait_for("Ready", "Serving", 180)
    yield service
    service.delete()


@pytest.fixture(scope="module")
def console(shown: Service) -> Iterator[Console]:
    opened = Console(shown)
    yield opened
    assert opened.stop() == (0, "")


def revisions(service: Service) -> dict[str, str]:
    """Return the revision of each engine that is ready, as its pod is labelled."""
    pods = [pod["metadata"] for pod in service.pods("engine")]
    return {
        one["name"]: one["labels"][LABEL_REVISION]
        for one in pods
        if service.cluster.pod_is_ready(one["name"], service.namespace)
    }


def test_the_page_comes_through_the_port_forward(console: Console) -> None:
    page = console.get("/", accept="text/html")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "/console/" in page.text
    assert console.get("/v1/models").json()["data"][0]["id"] == "shown"


def test_it_shows_the_service_that_its_router_belongs_to(shown: Service, console: Console) -> None:
    state = console.state()
    assert (state.source, state.service.name, state.service.namespace) == ("router", shown.name, shown.namespace)
    assert state.service.models == (shown.name,)
    told = {one.type: one.reason for one in state.service.statements}
    assert told == {one["type"]: one["reason"] for one in shown.status["conditions"]}
    (scaling,) = state.scaling
    assert (scaling.role, scaling.mode, scaling.current) == ("engine", "Internal", 1)
    assert (scaling.decisions[0].wanted, scaling.decisions[0].reason) == (1, shown.status["scaling"]["reason"])


def test_engines_have_the_revision_of_their_pods(shown: Service, console: Console) -> None:
    def seen() -> dict[str, str | None]:
        return {one.name: one.revision for one in console.state().engines if one.phase == "ready"}

    wait_until(lambda: seen() == revisions(shown), "each engine's revision is shown")
    before = shown.role("engine")["revision"]
    shown.edit(engine={**shown.spec["engine"], "maxModelLen": 1024})
    shown.wait_for("Progressing", "Settled", 180)
    wait_until(lambda: seen() == revisions(shown), "that of the new engine is shown")
    assert set(revisions(shown).values()) == {shown.role("engine")["revision"]} != {before}


def test_a_router_may_read_its_own_service_and_no_other(cluster: Cluster, shown: Service) -> None:
    review: Any = client.AuthorizationV1Api(cluster.connection)

    def may(verb: str, name: str) -> bool:
        asked = {"group": "pagefleet.dev", "resource": "inferenceservices", "name": name, "verb": verb}
        user = f"system:serviceaccount:{shown.namespace}:{shown.name}-router"
        spec = {"user": user, "resourceAttributes": {**asked, "namespace": shown.namespace}}
        return bool(review.create_subject_access_review({"spec": spec}).status.allowed)

    assert may("get", shown.name)
    assert not any((may("get", "another"), may("list", ""), may("patch", shown.name)))


def test_ctrl_c_ends_it_though_a_tab_is_open_and_a_stream_runs(shown: Service) -> None:
    opened = Console(shown)
    body = {"model": shown.name, "prompt": "The", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=opened.url, trust_env=False) as tab:
        assert tab.get("/readyz").status_code == 200
        with tab.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
            assert tab.get("/readyz").status_code == 200, "a second connection, which is kept open"
            began = time.monotonic()
            assert opened.stop() == (0, "")
    assert time.monotonic() - began < ENDS_WITHIN_S
