"""What an InferenceService needs, as workloads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_engine.cli import read_configuration
from pagefleet_operator.plan.command_lines import node_args
from pagefleet_operator.plan.workloads import Plan

from tests.fakes.local_plans import local_plan
from tests.fakes.resource_documents import profile_document


def test_five_lines_need_one_engine_and_one_router(build: Any) -> None:
    plan = local_plan(build())
    assert plan.engine.name == "qwen-engine"
    assert plan.engine.verb == "serve"
    assert plan.engine.args == (
        *("builtin://tiny", "--served-model-name", "qwen"),
        *("--dtype", "auto", "--drain-timeout", "30"),
    )
    assert plan.engine.replicas == plan.router.replicas == 1
    assert plan.router.args == (
        *("--model-name", "qwen", "--policy", "auto", "--cold-start-timeout", "600", "--drain-timeout", "30"),
    )
    assert (plan.router.probes.live, plan.router.probes.ready) == ("/livez", "/readyz")


def test_every_setting_reaches_its_flag_and_own_flags_come_last(build: Any) -> None:
    service = build(
        model={"uri": "file:///models/my%20model", "name": "m", "aliases": ["best", "chat"]},
        engine={"dtype": "bfloat16", "quantization": "fp8", "maxModelLen": 512, "args": ["--seed", "7"]},
        parallelism={"tensor": 2},
        replicas=3,
        router={"replicas": 2, "policy": "least-load"},
        rollout={"drainSeconds": 5},
    )
    plan = local_plan(service)
    assert plan.engine.args == (
        *("/models/my model", "--served-model-name", "m,best,chat", "--dtype", "bfloat16", "--quantization", "fp8"),
        *("--max-model-len", "512", "--tensor-parallel-size", "2", "--drain-timeout", "5", "--seed", "7"),
    )
    assert (plan.engine.replicas, plan.router.replicas) == (3, 2)
    assert plan.router.args == (
        *("--model-name", "m", "--model-alias", "best", "--model-alias", "chat"),
        *("--policy", "least-load", "--cold-start-timeout", "600", "--drain-timeout", "5"),
    )
    assert plan.engine.drain_timeout_s == plan.router.drain_timeout_s == 5


ROUTER = {
    "policy": "session",
    "workers": 2,
    "kvEvents": False,
    "sessionHeader": "X-User",
    "explain": True,
    "console": False,
    "queue": {"max": 7, "timeout": 8, "coldStartTimeout": 9},
}


def test_every_field_of_the_router_reaches_its_flag(build: Any) -> None:
    assert local_plan(build(router=ROUTER)).router.args == (
        *("--model-name", "qwen", "--policy", "session", "--workers", "2", "--session-header", "x-user", "--explain"),
        *("--no-console", "--no-kv-events", "--queue-size", "7", "--queue-timeout", "8", "--cold-start-timeout", "9"),
        *("--drain-timeout", "30"),
    )


def test_flags_are_those_of_the_programs(build: Any) -> None:
    """The real command lines understand what is planned, aliases included."""
    service = build(
        model={"uri": "builtin://tiny", "aliases": ["best"]},
        engine={
            "quantization": "fp8",
            "maxModelLen": 512,
            "kvOffload": {"memory": "1Gi", "disk": {"size": "1Gi"}},
        },
        router=ROUTER,
    )
    plan = local_plan(service)
    flags = {
        "serve": [arg for arg in plan.engine.args if arg.startswith("--")],
        "route": [arg for arg in plan.router.args if arg.startswith("--")],
    }
    for module, verb in (("pagefleet_engine.cli", "serve"), ("pagefleet_router.cli", "route")):
        shown = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        assert all(flag in shown for flag in flags[verb])


@pytest.mark.parametrize("spec", [{"parallelism": {"tensor": 2}}, {"resources": {"gpus": 2}}])
def test_ranks_are_those_of_the_engine(build: Any, spec: Any) -> None:
    engine, _ = read_configuration(local_plan(build(**spec)).engine.args, {})
    assert engine.parallel.tensor_parallel_size == 2


@pytest.mark.parametrize("node", ["0", "1"])
def test_nodes_are_told_apart_by_flags_that_engines_read(build: Any, node: str) -> None:
    workload = local_plan(build(nodes=2, parallelism={"tensor": 4})).engine
    assert (workload.nodes, workload.keyed) == (2, True)
    own = (*node_args(node, "10.0.0.1", 29500), "--fleet-key-file", "/etc/pagefleet/fleet/key")
    engine, server = read_configuration((*workload.args, *own), {})
    ranks = engine.parallel
    assert (ranks.tensor_parallel_size, ranks.nnodes, ranks.node_rank) == (4, 2, int(node))
    assert (ranks.master_addr, ranks.master_port, ranks.rank_wait_timeout) == ("10.0.0.1", 29500, 1800.0)
    assert server.headless == (node == "1")


def test_another_patience_of_the_rollout_restarts_no_group(build: Any) -> None:
    engines = [local_plan(build(nodes=2, rollout={"progressSeconds": one})).engine for one in (900, 1800)]
    assert engines[0].args == engines[1].args
    assert engines[0].revision == engines[1].revision


def test_parsers_and_the_store_of_responses_are_set_by_flags_of_the_engines(build: Any) -> None:
    """As docs/kubernetes.md says; the engine's own command line reads them."""
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"```yaml\n(spec:\n  engine:\n    args:\n.+?)```", page, re.S)
    service = build(**yaml.safe_load(example)["spec"])
    arguments = local_plan(service).engine.args
    _, server = read_configuration(arguments, {})
    assert (server.tool_call_parser, server.reasoning_parser) == ("hermes", "qwen3")
    assert (server.response_store, server.response_store_size) == ("/responses", 2**30)
    assert (server.response_store_days, server.trust_request_chat_template) == (7.0, True)


def test_a_profile_gives_what_the_service_leaves_out(build: Any) -> None:
    profile = profile_document(
        gpuType="h100",
        engine={"quantization": "fp8", "args": ["--seed", "1"], "env": [{"name": "A", "value": "1"}]},
        resources={"cpu": "4"},
    )
    engine = local_plan(build(resources={"gpuType": "h100"}, engine={"args": ["--seed", "2"]}), profile).engine
    assert engine.args[-6:] == ("--drain-timeout", "30", "--seed", "1", "--seed", "2")
    assert ("--quantization", "fp8") in zip(engine.args, engine.args[1:], strict=False)
    assert (engine.gpus, engine.cpu, [one.name for one in engine.env]) == (1, "4", ["A"])


def test_plan_is_the_same_in_any_process() -> None:
    """Revisions are compared between runs: they may not depend on hash seeds."""
    code = (
        "from tests.fakes.local_plans import local_plan\n"
        "from pagefleet_protocol.resource_documents import parse_inference_service as parse\n"
        "d = {'apiVersion': 'pagefleet.dev/v1alpha1', 'kind': 'InferenceService', 'metadata': {'name': 'q'},\n"
        "     'spec': {'model': {'uri': 'builtin://tiny'}, 'resources': {'cpu': 2, 'memory': '1Gi'}}}\n"
        "print(local_plan(parse(d)).engine.revision)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed)},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in (1, 2)
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 10


def revisions(plan: Plan) -> tuple[str, str]:
    return plan.engine.revision, plan.router.revision


SECRET = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}


@pytest.mark.parametrize(
    ("change", "engines", "routers"),
    [
        ({"model": {"uri": "file:///other"}}, True, False),
        ({"model": {"uri": "builtin://tiny", "name": "other"}}, True, True),
        ({"model": {"uri": "builtin://tiny", "aliases": ["best"]}}, True, True),
        ({"engine": {"dtype": "float32"}}, True, False),
        ({"engine": {"maxModelLen": 64}}, True, False),
        ({"engine": {"args": ["--seed", "1"]}}, True, False),
        ({"engine": {"env": [SECRET]}}, True, False),
        ({"engine": {"quantization": "fp8"}}, True, False),
        ({"engine": {"kvOffload": {"memory": "1Gi"}}}, True, False),
        ({"resources": {"cpu": 2}}, True, False),
        ({"resources": {"gpus": 1}}, True, False),
        ({"parallelism": {"tensor": 2}}, True, False),
        ({"parallelism": {"tensor": 1}}, False, False),
        ({"rollout": {"drainSeconds": 5}}, True, True),
        ({"router": {"policy": "least-load"}}, False, True),
        ({"router": {"queue": {"max": 1}}}, False, True),
        ({"router": {"kvEvents": False}}, True, True),
        ({"engine": {"args": ["--no-enable-prefix-caching"]}}, True, True),
        ({"parallelism": {"pipeline": 2}}, True, False),
        ({"parallelism": {"data": 2}}, True, False),
        ({"parallelism": {"tensor": 2, "expert": True}}, True, False),
        ({"parallelism": {"data": 1}, "nodes": 1}, False, False),
        ({"nodes": 2}, True, False),
        ({"replicas": 5}, False, False),
        ({"router": {"replicas": 3, "resources": {"cpu": 1}}}, False, False),
        ({"resources": {"memory": "1Gi", "shm": "2Gi"}}, False, False),
        ({"rollout": {"maxSurge": 3, "maxUnavailable": 1, "progressSeconds": 60}}, False, False),
        ({"engine": {"dtype": "auto", "image": "registry/engine:1"}}, False, False),
        ({"podTemplate": {"spec": {}}, "paused": True, "monitoring": {"serviceMonitor": True}}, False, False),
        ({"expose": {"type": "Ingress", "host": "a.example.org"}}, False, False),
    ],
)
def test_a_new_process_is_needed_only_by_what_it_reads(
    build: Any, change: dict[str, Any], engines: bool, routers: bool
) -> None:
    before, after = revisions(local_plan(build())), revisions(local_plan(build(**change)))
    assert (before[0] != after[0], before[1] != after[1]) == (engines, routers)


def test_routers_keep_their_addresses_and_engines_surge_only_where_there_is_room(build: Any) -> None:
    with_gpu = build(resources={"gpus": 1})
    full, roomy = local_plan(with_gpu, spare_gpu=False), local_plan(with_gpu, spare_gpu=True)
    assert (full.engine.rollout.max_surge, full.engine.rollout.max_unavailable) == (0, 1)
    assert (roomy.engine.rollout.max_surge, roomy.engine.rollout.max_unavailable) == (1, 0)
    on_cpu = local_plan(build(), spare_gpu=False).engine.rollout
    assert (on_cpu.max_surge, on_cpu.max_unavailable) == (1, 0)
    assert full.router.rollout.keep_slots
    assert full.router.rollout.max_surge == 0


def test_what_is_written_about_rollouts_counts(build: Any) -> None:
    rollout = {"maxSurge": 2, "maxUnavailable": 1, "progressSeconds": 60}
    engine = local_plan(build(replicas=4, resources={"gpus": 1}, rollout=rollout), spare_gpu=False).engine
    assert (engine.rollout.max_surge, engine.rollout.max_unavailable, engine.progress_s) == (2, 1, 60)
