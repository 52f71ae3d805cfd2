"""Command lines and environments of instances on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.cli import read_configuration
from pagefleet_operator.errors import OperatorError
from pagefleet_operator.local.launcher import Launcher
from pagefleet_operator.local.machine import Gpus
from pagefleet_operator.local.settings import Commands, LocalSettings
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_protocol.fleet_key import read_fleet_key

from tests.fakes.local_plans import local_plan

MakeLauncher = Callable[..., Launcher]


@pytest.fixture
def make_launcher(tmp_path: Path) -> Iterator[MakeLauncher]:
    with StateDir(tmp_path / "state") as state:

        def make(*gpus: str, cores: int = 8) -> Launcher:
            commands = Commands(serve=("serve-it",), route=("route-it",))
            settings = LocalSettings(
                manifest=tmp_path / "f.yaml",
                state_dir=state.path,
                models_dir=tmp_path / "models",
                commands=commands,
                host="0.0.0.0",
                port=0,
            )
            return Launcher(settings, state, Gpus(gpus), cores)

        yield make


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_an_engine_listens_on_the_loopback_only(make_launcher: MakeLauncher, build: Any) -> None:
    launch = make_launcher().launch("qwen", local_plan(build()).engine, 0)
    assert launch.argv[:2] == ("serve-it", "builtin://tiny")
    assert flag(launch.argv, "--host") == "127.0.0.1"
    assert launch.url == f"http://127.0.0.1:{flag(launch.argv, '--port')}"


def test_a_router_listens_where_the_user_said_and_reads_its_endpoints(make_launcher: MakeLauncher, build: Any) -> None:
    launcher = make_launcher()
    service = build()
    launch = launcher.launch("qwen", local_plan(service).router, 0)
    assert launch.argv[0] == "route-it"
    assert flag(launch.argv, "--host") == "0.0.0.0"
    assert flag(launch.argv, "--endpoints-file").endswith("qwen.endpoints.json")
    assert launch.url == launcher.claim_ports(service)
    assert launcher.launch("qwen", local_plan(service).router, 0).url == launch.url, "the address survives a restart"


def test_each_data_rank_is_an_endpoint_and_probes_go_to_the_port_of_all(
    make_launcher: MakeLauncher, build: Any
) -> None:
    service = build(parallelism={"data": 3})
    launch = make_launcher().launch("qwen", local_plan(service).engine, 0)
    port = int(flag(launch.argv, "--port"))
    assert flag(launch.argv, "--data-parallel-size") == "3"
    assert "--data-parallel-multi-port-external-lb" in launch.argv
    assert launch.endpoints == tuple(f"http://127.0.0.1:{port + rank}" for rank in range(3))
    assert launch.url == f"http://127.0.0.1:{port + 3}"
    assert read_configuration(launch.argv[1:], {})[1].port == port, "the engine takes it"


def test_data_ranks_that_share_experts_are_one_endpoint(make_launcher: MakeLauncher, build: Any) -> None:
    launch = make_launcher().launch("qwen", local_plan(build(parallelism={"data": 3, "expert": True})).engine, 0)
    assert launch.endpoints == (launch.url,) == (f"http://127.0.0.1:{flag(launch.argv, '--port')}",)
    parallel = read_configuration(launch.argv[1:], {})[0].parallel
    assert (parallel.data_ranks, parallel.enable_expert_parallel) == (3, True)


def test_engines_publish_on_a_pair_of_ports_and_share_a_key_with_routers(
    make_launcher: MakeLauncher, build: Any
) -> None:
    launcher, plan = make_launcher(), local_plan(build())
    engine, router = launcher.launch("qwen", plan.engine, 0).argv, launcher.launch("qwen", plan.router, 0).argv
    events, http = int(flag(engine, "--kv-events-port")), int(flag(engine, "--port"))
    assert http not in (events, events + 1)
    assert flag(engine, "--fleet-key-file") == flag(router, "--fleet-key-file")
    assert read_fleet_key(Path(flag(engine, "--fleet-key-file"))).secret


@pytest.mark.parametrize(
    "spec", [{"router": {"kvEvents": False}}, {"engine": {"args": ["--no-enable-prefix-caching"]}}]
)
def test_without_kv_events_there_is_no_key(make_launcher: MakeLauncher, build: Any, spec: dict[str, Any]) -> None:
    launcher, plan = make_launcher(), local_plan(build(**spec))
    for workload in (plan.engine, plan.router):
        argv = launcher.launch("qwen", workload, 0).argv
        assert not {"--kv-events-port", "--fleet-key-file"} & set(argv)


def test_cores_are_divided_among_all_engines(make_launcher: MakeLauncher, build: Any) -> None:
    launcher = make_launcher(cores=8)
    launcher.num_engines = 3
    assert flag(launcher.launch("qwen", local_plan(build()).engine, 0).argv, "--num-threads") == "2"


def test_the_ranks_of_an_engine_share_its_cores_and_have_a_gpu_each(make_launcher: MakeLauncher, build: Any) -> None:
    launcher = make_launcher("0", "1", "2", cores=8)
    on_cpu = launcher.launch("q", local_plan(build(parallelism={"tensor": 2})).engine, 0)
    assert flag(on_cpu.argv, "--tensor-parallel-size") == "2"
    assert flag(on_cpu.argv, "--num-threads") == "8", "of all ranks together"
    on_gpus = local_plan(build(resources={"gpus": 2})).engine
    launch = launcher.launch("q", on_gpus, 1)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert flag(launch.argv, "--tensor-parallel-size") == "2"
    with pytest.raises(OperatorError, match="waits for 2 free GPUs"):
        launcher.launch("q", on_gpus, 2)


def test_nodes_of_an_engine_are_processes_on_loopback_that_meet_at_one_port(
    make_launcher: MakeLauncher, build: Any
) -> None:
    engine = local_plan(build(resources={"gpus": 1}, nodes=2, parallelism={"tensor": 2})).engine
    launcher = make_launcher("0", "1", "2", cores=8)
    leader = launcher.launch("q", engine, 0)
    (follower,) = leader.followers
    assert (flag(leader.argv, "--node-rank"), flag(follower.argv, "--node-rank")) == ("0", "1")
    assert ("--headless" in leader.argv, "--headless" in follower.argv) == (False, True)
    for name in ("--master-addr", "--master-port", "--nnodes", "--fleet-key-file", "--num-threads"):
        assert flag(leader.argv, name) == flag(follower.argv, name)
    assert flag(leader.argv, "--num-threads") == "4"
    assert len({flag(leader.argv, "--port"), flag(follower.argv, "--port"), flag(leader.argv, "--master-port")}) == 3
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in (leader, follower)] == ["0", "1"]
    assert "--kv-events-port" not in follower.argv
    with pytest.raises(OperatorError, match="waits for 2 free GPUs"):
        launcher.launch("q", engine, 1)


def test_copies_on_several_nodes_have_a_port_each_where_nodes_meet(make_launcher: MakeLauncher, build: Any) -> None:
    engine = local_plan(build(nodes=2, parallelism={"data": 4, "expert": True})).engine
    launcher = make_launcher(cores=8)
    leader = launcher.launch("q", engine, 0)
    (follower,) = leader.followers
    first = int(flag(leader.argv, "--master-port"))
    meeting = set(range(first, first + 4))
    assert not meeting & {int(flag(one.argv, "--port")) for one in (leader, follower)}
    events = int(flag(leader.argv, "--kv-events-port"))
    assert not meeting & set(range(events, events + 16))
    parallel = read_configuration(leader.argv[1:], {})[0].parallel
    assert (parallel.nnodes, [len(parallel.copies_on(node)) for node in range(2)]) == (2, [2, 2])


def test_threads_sleep_while_they_wait_unless_the_user_said_how(
    make_launcher: MakeLauncher, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    engine = local_plan(build()).engine
    assert make_launcher().launch("qwen", engine, 0).environment["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert "OMP_WAIT_POLICY" not in make_launcher().launch("qwen", engine, 0).environment


def test_an_engine_sees_its_own_gpu_or_none(make_launcher: MakeLauncher, build: Any) -> None:
    launcher = make_launcher("0", "1")
    on_gpu = local_plan(build(resources={"gpus": 1})).engine
    assert [launcher.launch("q", on_gpu, number).environment["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["0", "1"]
    with pytest.raises(OperatorError, match="waits for a free GPU"):
        launcher.launch("q", on_gpu, 2)
    assert launcher.launch("q", local_plan(build()).engine, 3).environment["CUDA_VISIBLE_DEVICES"] == ""


def test_written_variables_reach_the_engine_but_not_its_devices(make_launcher: MakeLauncher, build: Any) -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": secret},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
        {"name": "KMP_BLOCKTIME", "value": "5"},
    ]
    launch = make_launcher().launch("qwen", local_plan(build(engine={"env": env})).engine, 0)
    assert launch.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "", "KMP_BLOCKTIME": "5"}
