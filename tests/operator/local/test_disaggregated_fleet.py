"""Prefill and decode engines as processes of one machine, with processes that pretend to be engines and routers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.cli import read_configuration
from pagefleet_operator.local.launcher import Launcher
from pagefleet_operator.local.machine import Gpus
from pagefleet_operator.local.manifest import Manifest
from pagefleet_operator.local.settings import Commands, LocalSettings
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_operator.local.wanted import check_gpus, ignored_fields, read_wanted
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.workloads import PartSettings, plan_workloads
from pagefleet_protocol.endpoints import decode_endpoints
from pagefleet_protocol.kube_names import RANK_PORTS_APART

TWO = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}


def peers(fleet: Any) -> list[str]:
    file = fleet.state_dir / "qwen.kv-peers"
    return sorted(file.read_text().split()) if file.exists() else []


def endpoints(fleet: Any) -> set[str]:
    return {one.id for one in decode_endpoints((fleet.state_dir / "qwen.endpoints.json").read_bytes()).endpoints}


def test_two_and_two_serve_and_know_each_other(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(disaggregation=TWO)) as fleet:
            await fleet.until(lambda: fleet.settled(4))
            await fleet.until(lambda: fleet.condition("KVLinkReady").status == "True")
            for kind in ("Ready", "EngineReady", "PrefillReady", "DecodeReady", "RouterReady"):
                assert fleet.condition(kind).status == "True", kind
            assert endpoints(fleet) == {f"qwen-{role}-{number}" for role in ("prefill", "decode") for number in (0, 1)}
            assert len(peers(fleet)) == 2, "prefill engines alone are asked"
            status = fleet.view().status
            assert (status.mode, status.ready) == ("Disaggregated", "4/4")
            assert {(await fleet.ask())[1]["role"] for _ in range(8)} == {"prefill", "decode"}
            assert (fleet.state_dir / "qwen.fleet-key").stat().st_mode & 0o777 == 0o600

    asyncio.run(scenario())


def test_a_prefill_engine_that_starts_again_is_found_again(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(disaggregation={})) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            before = peers(fleet)
            status, answer = await fleet.ask()
            while answer["role"] != "prefill":
                status, answer = await fleet.ask()
            assert status == 200
            os.kill(answer["pid"], signal.SIGKILL)
            await fleet.until(lambda: fleet.reporter.heard("qwen-prefill-0: starts again"))
            # It listens elsewhere, which is written a moment after it is told.
            await fleet.until(lambda: fleet.settled(2) and len(peers(fleet)) == 1 and peers(fleet) != before)

    asyncio.run(scenario())


def test_a_rollout_and_the_ways_in_and_out_leave_no_gap(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(disaggregation={})) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            failures: list[int] = []
            done = asyncio.Event()

            async def load() -> None:
                while not done.is_set():
                    status, _ = await fleet.ask()
                    failures.extend([status] if status != 200 else [])
                    await asyncio.sleep(0.02)

            task = asyncio.create_task(load())
            fleet.edit(document(disaggregation={}, engine={"args": ["--marker", "two"]}))
            await fleet.until(lambda: fleet.view().status.observed_generation == 2 and fleet.settled(2))
            fleet.edit(document())
            await fleet.until(lambda: fleet.states().keys() == {"engine-0", "router-0"} and fleet.settled(1))
            assert fleet.view().status.mode == "Aggregated"
            fleet.edit(document(disaggregation={}))
            await fleet.until(lambda: fleet.states().keys() == {"prefill-0", "decode-0", "router-0"})
            await fleet.until(lambda: fleet.settled(2))
            done.set()
            await task
            assert failures == []

    asyncio.run(scenario())


def test_parts_that_do_not_fit_are_told(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        other = {"decode": {"args": ["--kv-form", "cd"]}}
        async with start_fleet(document(disaggregation=other)) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            await fleet.until(lambda: fleet.condition("KVLinkReady").reason == Reason.KV_INCOMPATIBLE)
            await fleet.until(lambda: fleet.condition("Degraded").reason == Reason.KV_INCOMPATIBLE)
            assert fleet.condition("Ready").status == "True", "requests are answered all the same"

    asyncio.run(scenario())


def test_the_measured_load_is_told_with_what_to_change(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(disaggregation={})) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            assert fleet.view().status.ratio is None, "nobody asks"
            await fleet.ask(path="/prompts/1900")
            await fleet.until(lambda: fleet.view().status.ratio is not None)
            ratio = fleet.view().status.ratio
            assert ratio.message.startswith("more prefill engines are needed: ")
            assert "one computes 1000/s" in ratio.message
            assert fleet.reporter.heard(f"qwen: advice: {ratio.message}")

    asyncio.run(scenario())


@pytest.fixture
def launcher(tmp_path: Path, commands: Commands) -> Any:
    settings = LocalSettings(
        manifest=tmp_path / "f", state_dir=tmp_path, models_dir=tmp_path, commands=commands, port=0
    )
    with StateDir(tmp_path) as state:
        yield Launcher(settings, state, Gpus(["0", "1"]), 4)


def test_of_a_part_of_several_nodes_the_one_that_serves_passes_kv(launcher: Launcher, build: Any) -> None:
    both = {"prefill": {"nodes": 2, "parallelism": {"tensor": 2}}}
    (one,) = read_wanted(Manifest((build(disaggregation=both),)), {})
    parts = {role: PartSettings(own) for role, own in one.parts.items()}
    plan = plan_workloads(one.service, one.resolved, "builtin://tiny", parts=parts)
    prefill, decode = (launcher.launch("qwen", part, 0) for part in plan.parts)
    (follower,) = prefill.followers
    assert decode.followers == ()
    assert len(prefill.kv_addresses) == 1
    assert {"--kv-port", "--kv-host"} <= set(prefill.argv)
    assert not {"--kv-port", "--kv-host", "--kv-events-port"} & set(follower.argv)
    for argv in (prefill.argv, follower.argv):
        engine, server = read_configuration([*argv[argv.index("builtin://tiny") :]], {})
        assert (engine.parallel.nnodes, engine.parallel.tensor_parallel_size) == (2, 2)
        assert engine.kv_transfer.connectors == ("p2p",)
        assert engine.kv_transfer.kv_role == "prefill"
    assert server.headless


def test_ranks_that_share_experts_have_kv_ports_each(launcher: Launcher, build: Any) -> None:
    (one,) = read_wanted(Manifest((build(disaggregation={}, parallelism={"data": 2, "expert": True}),)), {})
    parts = {role: PartSettings(own) for role, own in one.parts.items()}
    plan = plan_workloads(one.service, one.resolved, "builtin://tiny", parts=parts)
    prefill, _ = (launcher.launch("qwen", part, 0) for part in plan.parts)
    assert len(prefill.endpoints) == 1
    first = int(prefill.argv[prefill.argv.index("--kv-port") + 1])
    assert prefill.kv_addresses == (f"127.0.0.1:{first}", f"127.0.0.1:{first + RANK_PORTS_APART}")
    assert "--kv-events-port" in prefill.argv


def test_engines_listen_on_ports_of_their_own_and_decode_asks_those_of_the_file(
    launcher: Launcher, build: Any, tmp_path: Path
) -> None:
    (one,) = read_wanted(Manifest((build(disaggregation={"threshold": 64, "fallback": "Fail"}),)), {})
    parts = {role: PartSettings(own) for role, own in one.parts.items()}
    plan = plan_workloads(one.service, one.resolved, "builtin://tiny", parts=parts)
    prefill, decode = (launcher.launch("qwen", part, 0) for part in plan.parts)
    router = launcher.launch("qwen", plan.router, 0)

    def flag(argv: tuple[str, ...], name: str) -> str:
        return argv[argv.index(name) + 1]

    assert prefill.kv_addresses == (f"127.0.0.1:{flag(prefill.argv, '--kv-port')}",)
    assert decode.kv_addresses == ()
    assert flag(prefill.argv, "--kv-host") == "127.0.0.1"
    assert flag(decode.argv, "--kv-peers") == f"file:{tmp_path}/qwen.kv-peers"
    assert "--kv-peers" not in prefill.argv
    ports = [int(flag(prefill.argv, name)) for name in ("--port", "--kv-port", "--kv-events-port")]
    taken = {ports[0], ports[1], ports[1] + 1, ports[2], ports[2] + 1}
    assert len(taken) == 5
    keys = {flag(one.argv, "--fleet-key-file") for one in (prefill, decode, router)}
    assert keys == {f"{tmp_path}/qwen.fleet-key"}
    assert (flag(router.argv, "--pd-threshold"), flag(router.argv, "--pd-fallback")) == ("64", "fail")


def test_parts_with_a_disk_have_folders_of_their_own(launcher: Launcher, build: Any, tmp_path: Path) -> None:
    keeps = {"memory": "1Gi", "disk": {"size": "1Gi"}}
    service = build(disaggregation={"prefill": {"kvOffload": keeps}}, engine={"kvOffload": {"memory": "2Gi"}})
    (one,) = read_wanted(Manifest((service,)), {})
    parts = {role: PartSettings(own) for role, own in one.parts.items()}
    plan = plan_workloads(one.service, one.resolved, "builtin://tiny", parts=parts)
    prefill, decode = (launcher.launch("qwen", part, 1).argv for part in plan.parts)
    assert prefill[prefill.index("--kv-offload-dir") + 1] == f"{tmp_path}/kv/qwen-prefill-1"
    assert "--kv-offload-dir" not in decode
    assert [argv[argv.index("--kv-connector") + 1] for argv in (prefill, decode)] == ["p2p,offload"] * 2
    assert [argv[argv.index("--kv-offload-memory") + 1] for argv in (prefill, decode)] == [str(2**30), str(2**31)]


def test_both_parts_need_their_gpus(build: Any) -> None:
    both = {"prefill": {"replicas": 2}, "decode": {"resources": {"gpus": 0}, "podTemplate": {"spec": {}}}}
    wanted = read_wanted(Manifest((build(disaggregation=both, resources={"gpus": 1}),)), {})
    assert wanted[0].gpus_by_workload == {"qwen-prefill": 2, "qwen-decode": 0}
    assert check_gpus(wanted, 2) == []
    assert "2 GPUs are asked for" in check_gpus(wanted, 1)[0]
    assert "spec.disaggregation.decode.podTemplate" in ignored_fields(wanted[0])
