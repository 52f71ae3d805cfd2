"""Connectors of an engine whose ranks are on two machines, which network namespaces play."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from pagefleet_protocol.fleet_key import FleetKey

from tests.fakes.free_ports import free_ports
from tests.fakes.kv_serving import ENGINE_FLAGS, MODEL_NAME, Questions, ServedEngine, until
from tests.fakes.network_namespace import NetworkNamespace, NoNamespaces, network_namespace
from tiny.dataset import load_knowledge

pytestmark = pytest.mark.fleet

HERE, THERE = "198.18.74.1", "198.18.74.2"
SECRET = b"k" * 40
START_S = 300.0
"""Three engines on a busy machine."""
FLOAT = ("--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def machine() -> Iterator[NetworkNamespace]:
    try:
        with network_namespace({"kvnodes": (HERE, THERE)}) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(f"no namespaces here: {error}")


def over_machines(
    made: ExitStack, machine: NetworkNamespace, folder: Path, sizes: tuple[str, ...], flags: tuple[str, ...]
) -> ServedEngine:
    """An engine of two ranks, the second there; call `started`."""
    key = folder / "fleet-key"
    key.write_bytes(SECRET)
    nodes = ("--nnodes", "2", "--master-addr", HERE, "--master-port", str(free_ports()))
    shared = (*FLOAT, *sizes, *nodes, *flags)
    leader = ServedEngine(folder / "leader.log", key, "both", (*shared, "--node-rank", "0"))
    made.callback(leader.stop)
    command = [*machine.within, sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", *ENGINE_FLAGS]
    command += ["--kv-role", "both", "--fleet-key-file", str(key), *shared, "--node-rank", "1", "--headless"]
    with (folder / "follower.log").open("w") as log:
        follower = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    made.callback(follower.wait)
    made.callback(follower.kill)
    return leader


@pytest.mark.parametrize("sizes", [("-tp=2",), ("-pp=2",)], ids=["tensor", "stages"])
def test_two_machines_pass_their_kv_to_a_third_engine_and_take_its(
    machine: NetworkNamespace, tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    """The other engine is where it reaches the leader by its host alone."""
    first, other = free_ports(2), free_ports(2)
    addresses = {"spread": f"{HERE}:{first}", "alone": f"{THERE}:{other}"}
    with ExitStack() as made:
        spread = over_machines(
            made,
            machine,
            tmp_path,
            sizes,
            ("--kv-host", HERE, "--kv-port", str(first), "--kv-peers", addresses["alone"]),
        )
        there = ("--host", THERE, "--kv-host", THERE, "--kv-port", str(other), "--kv-peers", addresses["spread"])
        key_file = tmp_path / "fleet-key"
        alone = ServedEngine(tmp_path / "alone.log", key_file, "both", (*FLOAT, *there), within=machine.within)
        made.callback(alone.stop)
        for engine in (spread, alone):
            engine.started(START_S)

        async def passed() -> list[int]:
            async with httpx.AsyncClient(timeout=120) as http:
                ask = Questions(http, FleetKey(SECRET)).ask
                pairs = [(spread, alone, addresses["spread"]), (alone, spread, addresses["alone"])] * 3
                found = [await ask(*pair).num_passed() for pair in pairs]
            for engine in (spread, alone):
                await until(lambda engine=engine: engine.at_baseline)  # type: ignore[misc]
            return found

        found = asyncio.run(passed())
        assert sum(found[::2]) > 0
        assert sum(found[1::2]) > 0


def test_host_memory_of_the_leader_keeps_what_both_machines_had(machine: NetworkNamespace, tmp_path: Path) -> None:
    flags = ("--kv-connector", "offload", "--kv-offload-memory", "64M", "--num-kv-blocks", "18")
    exchanges = sorted(load_knowledge().exchanges(), key=lambda one: -len(str(one.messages)))[:6]
    with ExitStack() as made:
        engine = over_machines(made, machine, tmp_path, ("-tp=2",), (*flags, "--max-model-len", "256"))
        engine.started(START_S)
        for _ in range(2):
            for one in exchanges:
                body = {"model": MODEL_NAME, "temperature": 0, "messages": list(one.messages)}
                told = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=120).json()
                assert told["choices"][0]["message"]["content"] == one.answer
        assert engine.figure("offload_hits_total") > 0
