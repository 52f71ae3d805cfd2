"""What an InferenceService needs, as workloads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pagefleet_operator.plan.workloads import plan_workloads


def test_five_lines_need_one_engine_and_one_router(build: Any) -> None:
    plan = plan_workloads(build(), drain_timeout_s=30)
    assert plan.engine.name == "qwen-engine"
    assert plan.engine.verb == "serve"
    assert plan.engine.args == (
        *("builtin://tiny", "--served-model-name", "qwen"),
        *("--dtype", "auto", "--drain-timeout", "30"),
    )
    assert plan.engine.replicas == plan.router.replicas == 1
    assert plan.router.args == ("--policy", "prefix", "--drain-timeout", "30")
    assert (plan.router.probes.live, plan.router.probes.ready) == ("/livez", "/readyz")


def test_every_setting_reaches_its_flag_and_own_flags_come_last(build: Any) -> None:
    service = build(
        model={"uri": "file:///models/my%20model", "name": "m"},
        engine={"dtype": "bfloat16", "maxModelLen": 512, "args": ["--seed", "7"]},
        replicas=3,
        router={"replicas": 2, "policy": "least-load"},
    )
    plan = plan_workloads(service, drain_timeout_s=2.5)
    assert plan.engine.args == (
        *("/models/my model", "--served-model-name", "m", "--dtype", "bfloat16"),
        *("--max-model-len", "512", "--drain-timeout", "2.5", "--seed", "7"),
    )
    assert (plan.engine.replicas, plan.router.replicas) == (3, 2)
    assert plan.router.args == ("--policy", "least-load", "--drain-timeout", "2.5")


def test_plan_is_the_same_in_any_process() -> None:
    """Revisions are compared between runs: they may not depend on hash seeds."""
    code = (
        "from pagefleet_operator.plan.workloads import plan_workloads\n"
        "from pagefleet_protocol.inference_service import parse_inference_service as parse\n"
        "d = {'apiVersion': 'pagefleet.dev/v1alpha1', 'kind': 'InferenceService', 'metadata': {'name': 'q'},\n"
        "     'spec': {'model': {'uri': 'builtin://tiny'}, 'resources': {'cpu': 2, 'memory': '1Gi'}}}\n"
        "print(plan_workloads(parse(d), 30).engine.revision)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 10


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "file:///other"}},
        {"model": {"uri": "builtin://tiny", "name": "other"}},
        {"engine": {"dtype": "float32"}},
        {"engine": {"maxModelLen": 64}},
        {"engine": {"args": ["--seed", "1"]}},
        {"resources": {"cpu": 2}},
        {"resources": {"gpus": 1}},
    ],
)
def test_what_an_engine_reads_makes_a_new_revision(build: Any, change: dict[str, Any]) -> None:
    assert plan_workloads(build(**change), 30).engine.revision != plan_workloads(build(), 30).engine.revision


@pytest.mark.parametrize("change", [{"replicas": 5}, {"router": {"policy": "least-load", "replicas": 3}}])
def test_what_an_engine_does_not_read_keeps_the_revision(build: Any, change: dict[str, Any]) -> None:
    assert plan_workloads(build(**change), 30).engine.revision == plan_workloads(build(), 30).engine.revision


def test_a_new_policy_is_a_new_revision_of_routers(build: Any) -> None:
    changed = plan_workloads(build(router={"policy": "least-load"}), 30).router
    assert changed.revision != plan_workloads(build(), 30).router.revision


def test_routers_keep_their_addresses_and_engines_surge_only_where_there_is_room(build: Any) -> None:
    with_gpu = build(resources={"gpus": 1})
    full, roomy = plan_workloads(with_gpu, 30, spare_gpu=False), plan_workloads(with_gpu, 30, spare_gpu=True)
    assert (full.engine.rollout.max_surge, full.engine.rollout.max_unavailable) == (0, 1)
    assert (roomy.engine.rollout.max_surge, roomy.engine.rollout.max_unavailable) == (1, 0)
    on_cpu = plan_workloads(build(), 30, spare_gpu=False).engine.rollout
    assert (on_cpu.max_surge, on_cpu.max_unavailable) == (1, 0)
    assert full.router.rollout.keep_slots
    assert full.router.rollout.max_surge == 0
