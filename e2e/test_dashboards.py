"""Every panel of every dashboard shows something: a real Prometheus scrapes a real fleet under load, and an operator.

The fleet has prefill and decode engines, of which one is killed; the operator runs over an emulated API server and
scales a service by what the fleet's router says.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pagefleet_protocol.kube_names import FIELD_MANAGER, LABEL_COMPONENT, LABEL_MANAGED_BY, LABEL_SERVICE

from charts.monitoring.dashboards import DASHBOARDS
from charts.monitoring.grafana import RANGE, RATE, chosen
from e2e.fleet_process import ENGINE_ARGS, PATIENCE_S, FleetProcess
from e2e.load import Load, long_request
from tests.fakes.free_ports import free_ports
from tests.fakes.kube_operator import NAMESPACE, SETTINGS, SilentPods, World, world
from tiny.dataset import Exchange

PROMETHEUS = shutil.which("prometheus") or ""
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not PROMETHEUS, reason="prometheus is not here: apt-get install prometheus"),
]

VARIABLES = {
    RATE: "20s",
    RANGE: "2m",
    "$namespace": ".*",
    "$service": ".*",
    "$objective": "0.999",
    "$ttft": "5|5.0",
    "$itl": "0.25",
}
QUERIES = {
    f"{dashboard.title} / {panel.title} / {legend}": query
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for legend, query in panel.queries.items()
}
SPEC: dict[str, Any] = {
    "disaggregation": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}, "threshold": 0},
    "engine": {"args": ["--num-threads", "1", "--num-kv-blocks", "512", "--max-num-seqs", "4"]},
    "router": {"queue": {"max": 2}},
}


TRIED: dict[str, Any] = {"rollout": {"canary": {"steps": [{"percent": 50, "seconds": 600}]}}}
"""Another fleet, of engines for whole requests: a revision is tried out there for longer than this test looks."""


class PodsOfFleet(SilentPods):
    """Pods whose router is that of a real fleet."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    async def router_page(self, ip: str) -> bytes | None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            return (await http.get(f"{self._url}/metrics")).content


class Prometheus:
    """A server that scrapes what a file lists, every second."""

    def __init__(self, folder: Path, port: int) -> None:
        self._targets = folder / "targets.json"
        self.url = f"http://127.0.0.1:{port}"
        found = {"files": [str(self._targets)], "refresh_interval": "1s"}
        job = {"job_name": "all", "honor_labels": True, "file_sd_configs": [found]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def scrape(self, urls: Sequence[str]) -> None:
        """Scrape these from now on."""
        part = self._targets.with_suffix(".part")
        part.write_text(json.dumps([{"targets": [url.removeprefix("http://") for url in urls]}]))
        part.replace(self._targets)


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Prometheus]:
    made = Prometheus(folder, port)
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield made
    finally:
        process.terminate()
        process.wait(60)


async def shows(http: httpx.AsyncClient, query: str) -> bool:
    """Whether a panel's query returns a number now."""
    query = chosen(query)
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    reply = await http.get("/api/v1/query", params={"query": query})
    assert reply.status_code == 200, f"{query}: {reply.text}"
    values: Sequence[Mapping[str, Any]] = reply.json()["data"]["result"]
    return any(math.isfinite(float(one["value"][1])) for one in values)


def scaled_service(w: World) -> None:
    """Have a service that scales by itself, with a router."""
    w.apply(autoscaling={"max": 3, "target": {"queue": 2}})
    labels = {LABEL_SERVICE: "qwen", LABEL_COMPONENT: "router", LABEL_MANAGED_BY: FIELD_MANAGER}
    status = {"podIP": "10.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    w.api.add("Pod", {"metadata": {"name": "qwen-router-1", "labels": labels}, "status": status}, NAMESPACE)


async def crowd(url: str) -> None:
    """Ask for more at once than the door lets in, however slow clients are on this machine."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = long_request(100) | {"stream": False}
        await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(30)))


async def until_all_show(server: Prometheus, fleet: FleetProcess, others: Sequence[str]) -> list[str]:
    """Return the queries that show nothing, of those that should within a while; `others` are scraped as well."""
    missing = list(QUERIES)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        for _ in range(180):
            server.scrape([fleet.url, *others, *(one.url for one in fleet.endpoints())])
            with_numbers = await asyncio.gather(*(shows(http, QUERIES[name]) for name in missing))
            missing = [name for name, shown in zip(missing, with_numbers, strict=True) if not shown]
            if not missing:
                break
            await asyncio.gather(asyncio.sleep(1), crowd(fleet.url))
    return missing


def test_every_panel_shows_something(tmp_path: Path, exchanges: Sequence[Exchange]) -> None:
    port = free_ports(2)

    async def scenario(fleet: FleetProcess, tried: FleetProcess, server: Prometheus) -> list[str]:
        settings = replace(SETTINGS, port=port + 1)
        load = Load(fleet.url, exchanges, askers=12, streamers=8, stream_tokens=40, sentences=60)
        few = Load(tried.url, exchanges, askers=1, streamers=2, stream_tokens=40)
        async with world() as made:
            made.pods = PodsOfFleet(fleet.url)
            async with made.operator(settings), load, few:
                scaled_service(made)
                await made.tried("tried")
                await load.progress(20)
                os.kill(fleet.core_pid("tiny-decode-0"), signal.SIGKILL)
                return await until_all_show(server, fleet, [tried.url, f"http://127.0.0.1:{port + 1}"])

    (tmp_path / "tried").mkdir()
    with (
        FleetProcess(tmp_path, **SPEC) as fleet,
        FleetProcess(tmp_path / "tried", **TRIED) as tried,
        prometheus(tmp_path, port) as server,
    ):
        tried.until(lambda: tried.serves(1))
        tried.edit(engine={"args": [*ENGINE_ARGS, "--max-num-seqs", "8"]})
        fleet.until(lambda: fleet.serves(3))
        server.scrape([fleet.url, *(one.url for one in fleet.endpoints())])
        assert asyncio.run(scenario(fleet, tried, server)) == []
