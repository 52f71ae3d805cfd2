"""The whole operator and engines over several nodes, against an emulated API server and LeaderWorkerSet controller."""

from __future__ import annotations

from dataclasses import replace

from tests.fakes.kube_groups import UNSCHEDULABLE, Groups, running
from tests.fakes.kube_operator import NAMESPACE, SETTINGS, World, run, until

QUICK = replace(SETTINGS, timing=replace(SETTINGS.timing, discovery=0.05))


def replicas(w: World) -> tuple[str, int]:
    status = w.get("InferenceService", "qwen").get("status") or {}
    return str(status.get("ready", "")), int(status.get("replicas", -1))


def test_engines_of_several_nodes_wait_for_their_kind_and_are_made_once_it_is_installed() -> None:
    async def scenario(w: World) -> None:
        async with w.operator(QUICK):
            w.apply(nodes=2, replicas=2)
            await until(lambda: w.condition("Degraded").get("reason") == "KindMissing")
            said = w.condition("Degraded")["message"]
            assert said.startswith("spec.nodes: an engine of 2 ranks on 2 nodes is a LeaderWorkerSet, which this")
            assert "Install it: kubectl apply --server-side -f https://github.com/kubernetes-sigs/lws/" in said
            assert w.find("Deployment", "qwen-engine") is None
            assert w.find("Deployment", "qwen-router") is not None
            groups = Groups(w)
            await until(groups.once(lambda: w.condition("EngineReady").get("reason") == "AllReady"))
            assert w.condition("Degraded")["status"] == "False"
            assert replicas(w) == ("2/2", 2)
            assert list(groups.pods()) == ["qwen-engine-0", "qwen-engine-0-1", "qwen-engine-1", "qwen-engine-1-1"]
            assert {"qwen-engine-0", "qwen-engine-1"} <= {
                name for kind, name in w.children() if kind == "NetworkPolicy"
            }

    run(scenario)


def test_a_node_that_does_not_come_and_one_that_fails_are_named() -> None:
    async def scenario(w: World) -> None:
        groups = Groups(w)
        groups.states["qwen-engine-0-1"] = UNSCHEDULABLE
        groups.states["qwen-engine-0"] = running(ready=False)
        async with w.operator(QUICK):
            w.apply(nodes=2, parallelism={"tensor": 4})
            await until(groups.once(lambda: w.condition("EngineReady").get("reason") == "InsufficientGPU"))
            said = w.condition("EngineReady")["message"]
            assert said.startswith("0 of 1 engines ready; group 0, node 1 of 2 (ranks 2 to 3): no node has enough free")
            assert "nvidia.com/gpu for qwen-engine-0-1" in said
            # It comes, and fails: before its group is made anew, its last words are told.
            died = running(ready=False, restarts=1, ended="EngineDead: rank 3 on node-b ended: out of memory")
            groups.states = {"qwen-engine-0": running(ready=False), "qwen-engine-0-1": died}
            for name, status in groups.states.items():
                w.api.set_status("Pod", NAMESPACE, name, status)
            await until(lambda: w.condition("EngineReady").get("reason") == "CrashLoop")
            said = w.condition("EngineReady")["message"]
            assert "group 0, node 1 of 2 (ranks 2 to 3): container engine of qwen-engine-0-1 ended" in said
            assert "rank 3 on node-b ended: out of memory" in said
            before = {name: pod["metadata"]["uid"] for name, pod in groups.pods().items()}
            groups.states.clear()
            await until(groups.once(lambda: w.condition("EngineReady").get("reason") == "AllReady"))
            after = {name: pod["metadata"]["uid"] for name, pod in groups.pods().items()}
            assert before.keys() == after.keys()
            assert not set(before.values()) & set(after.values())  # all of the group, not the one that failed

    run(scenario)


def test_a_change_replaces_groups_as_a_whole_and_scaling_counts_them() -> None:
    async def scenario(w: World) -> None:
        groups = Groups(w)
        async with w.operator(QUICK):
            w.apply(nodes=2, replicas=2)
            await until(groups.once(lambda: replicas(w) == ("2/2", 2)))
            before = groups.revisions()
            w.apply(nodes=2, replicas=2, engine={"maxModelLen": 64})
            fewest = [2]

            def rolled() -> bool:
                fewest.append(int(replicas(w)[0].partition("/")[0]))
                return groups.revisions().isdisjoint(before) and replicas(w) == ("2/2", 2)

            await until(groups.once(rolled))
            assert min(fewest) == 2  # one more than there are to be came first
            w.apply(nodes=2, replicas=0, engine={"maxModelLen": 64})
            await until(groups.once(lambda: not groups.pods() and replicas(w) == ("0/0", 0)))
            # It goes after the pods that it was for.
            await until(groups.once(lambda: ("NetworkPolicy", "qwen-engine-1") not in w.children()))
            w.apply(nodes=2, replicas=1, engine={"maxModelLen": 64})
            await until(groups.once(lambda: replicas(w) == ("1/1", 1)))

    run(scenario)


def test_prefill_and_decode_engines_of_several_nodes_are_groups_of_one_revision() -> None:
    async def scenario(w: World) -> None:
        async with w.operator(QUICK):
            w.apply(nodes=2, disaggregation={"prefill": {"replicas": 2}})
            await until(lambda: w.condition("Degraded").get("reason") == "KindMissing")
            groups = Groups(w)
            await until(groups.once(lambda: replicas(w) == ("3/3", 3)))
            for kind in ("PrefillReady", "DecodeReady", "EngineReady"):
                assert w.condition(kind)["status"] == "True", kind
            (before,) = groups.revisions()
            sets = {f"qwen-prefill-{before}": 2, f"qwen-decode-{before}": 1}
            assert list(groups.pods()) == sorted(
                name for one, count in sets.items() for n in range(count) for name in (f"{one}-{n}", f"{one}-{n}-1")
            )
            labels = [pod["metadata"]["labels"] for pod in groups.pods().values()]
            told = [(one["pagefleet.dev/role"], one["app.kubernetes.io/component"]) for one in labels]
            assert sorted(told) == [
                *[("decode", "engine"), ("decode", "follower")],
                *[("prefill", "engine")] * 2,
                *[("prefill", "follower")] * 2,
            ]
            assert {f"{one}-0" for one in sets} <= {name for kind, name in w.children() if kind == "NetworkPolicy"}

            w.apply(nodes=2, disaggregation={"prefill": {"replicas": 2}}, engine={"maxModelLen": 64})
            await until(groups.once(lambda: groups.revisions().isdisjoint({before}) and replicas(w) == ("3/3", 3)))
            (after,) = groups.revisions()
            assert {name for kind, name in w.children() if kind == "LeaderWorkerSet"} == {
                f"qwen-prefill-{after}",
                f"qwen-decode-{after}",
            }

    run(scenario)


def test_engines_of_one_node_serve_until_those_of_several_do() -> None:
    async def scenario(w: World) -> None:
        groups = Groups(w)
        async with w.operator(QUICK):
            w.apply()
            await until(lambda: w.find("Deployment", "qwen-engine"))
            labels = w.get("Deployment", "qwen-engine")["spec"]["template"]["metadata"]["labels"]
            w.api.add("Pod", {"metadata": {"name": "qwen-engine-a", "labels": labels}, "status": running()}, NAMESPACE)
            served = {"replicas": 1, "availableReplicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
            w.api.set_status("Deployment", NAMESPACE, "qwen-engine", served)
            await until(lambda: w.condition("EngineReady").get("reason") == "AllReady")
            groups.states["qwen-engine-0-1"] = UNSCHEDULABLE
            groups.states["qwen-engine-0"] = running(ready=False)
            w.apply(nodes=2)
            await until(groups.once(lambda: "qwen-engine-0-1" in groups.pods()))
            await w.settled()
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 1
            assert replicas(w)[0] == "1/1"
            groups.states = dict.fromkeys(groups.states, running())
            await until(groups.once(lambda: w.find("Deployment", "qwen-engine") is None))
            assert w.get("LeaderWorkerSet", "qwen-engine")["status"]["readyReplicas"] == 1

    run(scenario)
