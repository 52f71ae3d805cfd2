"""The whole operator against an emulated API server: what it makes, what it puts right, what it leaves alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from pagefleet_protocol.kube_names import FIELD_MANAGER

from tests.fakes.kube_kinds import Kind
from tests.fakes.kube_operator import NAMESPACE, SETTINGS, World, run, until
from tests.fakes.kube_store import Write

CHILDREN = {
    ("ConfigMap", "qwen-openai"),
    ("Deployment", "qwen-engine"),
    ("Deployment", "qwen-router"),
    ("NetworkPolicy", "qwen-engine"),
    ("NetworkPolicy", "qwen-router"),
    ("PodDisruptionBudget", "qwen-engine"),
    ("PodDisruptionBudget", "qwen-router"),
    ("Role", "qwen-router"),
    ("RoleBinding", "qwen-router"),
    ("Secret", "qwen-fleet"),
    ("Service", "qwen"),
    ("Service", "qwen-engine"),
    ("ServiceAccount", "qwen-engine"),
    ("ServiceAccount", "qwen-router"),
}


def applied(w: World) -> list[str]:
    return [write for write in w.api.writes() if write.startswith("PATCH") and not write.endswith("/status")]


def test_five_lines_become_children_and_a_status() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            w.apply()
            await until(lambda: w.condition("Ready"))
            await w.settled()
            assert set(w.children()) == CHILDREN
            assert len(applied(w)) == len(CHILDREN) - 1  # each once; the Secret is created, and never touched again
            uid = w.get("InferenceService", "qwen")["metadata"]["uid"]
            owners = [child["metadata"]["ownerReferences"] for child in w.children().values()]
            assert all(owner[0]["uid"] == uid and owner[0]["controller"] for owner in owners)
            assert w.condition("EngineReady")["reason"] == "Starting"
            assert running.value("services", ready="False", reason="Starting") == 1

    run(scenario)


def test_metrics_tell_of_a_revision_that_is_tried_out() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            of = {"namespace": NAMESPACE, "service": "qwen", "phase": "Starting"}
            percent = partial(running.metrics.registry.get_sample_value, "pagefleet_operator_canary_percent", of)
            assert percent() is None
            await w.tried("qwen")
            await until(lambda: percent() == 0.0)  # its watch has told of the status

    run(scenario)


def test_a_deleted_service_takes_its_children_along_and_is_not_made_again() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            w.delete("InferenceService", "qwen")
            await w.settled()
            assert w.children() == {}

    run(scenario)


def test_an_edit_reaches_the_children_and_what_is_no_more_wanted_goes() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply(replicas=2, expose={"type": "Ingress", "host": "llm.example.org"})
            await until(lambda: w.find("Ingress", "qwen"))
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 2
            w.apply(replicas=3, expose={"type": "ClusterIP", "host": None})
            await until(lambda: w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 3)
            await until(lambda: not w.find("Ingress", "qwen"))

    run(scenario)


def test_what_somebody_changed_is_put_right_and_what_somebody_added_is_kept() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            w.patch("Service", "qwen", {"metadata": {"annotations": {"their/own": "1"}}, "spec": {"type": "NodePort"}})
            w.delete("ConfigMap", "qwen-openai")
            await until(lambda: w.get("Service", "qwen")["spec"].get("type", "ClusterIP") == "ClusterIP")
            await until(lambda: w.find("ConfigMap", "qwen-openai"))
            assert w.get("Service", "qwen")["metadata"]["annotations"]["their/own"] == "1"

    run(scenario)


def test_replicas_that_an_autoscaler_set_are_kept() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            deployments = w.api.kind("Deployment")
            scaler = Write(manager="autoscaler", subresource="scale", content_type="application/merge-patch+json")
            # The emulator writes a subresource as status; the scale's own path is the replicas.
            entry = w.api.store._entry(deployments, NAMESPACE, "qwen-engine")
            scaled = w.get("Deployment", "qwen-engine")
            scaled["spec"]["replicas"] = 4
            w.api.store._take_changed(entry, entry.document, scaled, scaler)
            entry.document = scaled
            w.api.store._publish("MODIFIED", deployments, entry, scaled)
            w.apply(router={"replicas": 2})
            await until(lambda: w.get("Deployment", "qwen-router")["spec"]["replicas"] == 2)
            await w.settled()
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 4

    run(scenario)


def test_an_object_of_somebody_else_is_not_taken_over() -> None:
    async def scenario(w: World) -> None:
        theirs = {"metadata": {"name": "qwen-openai"}, "data": {"theirs": "1"}}
        w.api.store.create(w.api.kind("ConfigMap"), NAMESPACE, theirs)
        async with w.operator():
            w.apply()
            await until(lambda: w.condition("Degraded").get("reason") == "NameTaken")
            await w.settled()
            assert w.get("ConfigMap", "qwen-openai")["data"] == {"theirs": "1"}
            assert w.find("Deployment", "qwen-engine")

    run(scenario)


def test_an_invalid_service_says_what_is_wrong_and_what_ran_keeps_running() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            w.apply(replicas=-3, engine={"dtpye": "auto"})
            await until(lambda: w.condition("Degraded").get("reason") == "InvalidSpec")
            assert "spec.replicas: must be at least 0" in w.condition("Degraded")["message"]
            assert "Did you mean dtype?" in w.condition("Degraded")["message"]
            await w.settled()
            assert set(w.children()) == CHILDREN

    run(scenario)


def test_two_services_of_one_name_in_two_namespaces_are_two() -> None:
    async def scenario(w: World) -> None:
        w.api.add_namespace("other")
        async with w.operator(replace(SETTINGS, namespaces=(NAMESPACE, "other"))):
            w.apply(replicas=1)
            w.apply(namespace="other", replicas=2)
            await until(lambda: set(w.children()) == CHILDREN and set(w.children("other")) == CHILDREN)
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 1
            assert w.get("Deployment", "qwen-engine", "other")["spec"]["replicas"] == 2

    run(scenario)


def test_a_hundred_edits_are_few_looks() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            before = running.value("reconcile_seconds_count")
            for number in range(100):
                w.apply(replicas=number % 5, router={"replicas": 3})
                if number % 10 == 9:  # how often it may look must not depend on how long edits take
                    await asyncio.sleep(0.001)
            await until(lambda: w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 4)
            await w.settled()
            assert running.value("reconcile_seconds_count") - before < 40

    run(scenario)


def test_a_huge_object_is_carried_whole() -> None:
    async def scenario(w: World) -> None:
        env = [{"name": f"VARIABLE_{number}", "value": "x" * 4096} for number in range(64)]
        notes = {"example.org/notes": "y" * 200_000}
        async with w.operator():
            w.apply(engine={"env": env})
            w.patch("InferenceService", "qwen", {"metadata": {"annotations": notes}})
            await until(lambda: w.find("Deployment", "qwen-engine"))
            container = w.get("Deployment", "qwen-engine")["spec"]["template"]["spec"]["containers"][0]
            assert sum(len(one.get("value", "")) for one in container["env"]) >= 64 * 4096

    run(scenario)


def test_events_tell_what_changed_once() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply(profileRef={"name": "nobody"})
            await until(lambda: events(w))
            await w.settled()
            assert [event["reason"] for event in events(w)] == ["ProfileNotFound"]
            assert events(w)[0]["type"] == "Warning"
            assert events(w)[0]["involvedObject"]["uid"] == w.get("InferenceService", "qwen")["metadata"]["uid"]

    run(scenario)


def events(w: World) -> list[dict[str, Any]]:
    return list(w.api.store.all_of(w.api.kind("Event"), NAMESPACE))


def test_a_profile_that_comes_later_is_noticed() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply(profileRef={"name": "h100"})
            await until(lambda: w.condition("Degraded").get("reason") == "ProfileNotFound")
            profile = {"metadata": {"name": "h100"}, "spec": {"nodeSelector": {"gpu": "h100"}}}
            w.api.store.create(w.api.kind("InferenceProfile"), None, profile)
            await until(lambda: w.find("Deployment", "qwen-engine"))
            pod = w.get("Deployment", "qwen-engine")["spec"]["template"]["spec"]
            assert pod["nodeSelector"]["gpu"] == "h100"

    run(scenario)


def test_a_kind_that_is_installed_later_is_used() -> None:
    async def scenario(w: World) -> None:
        quick = replace(SETTINGS, timing=replace(SETTINGS.timing, discovery=0.1))
        async with w.operator(quick) as running:
            w.apply(monitoring={"serviceMonitor": True})
            await until(lambda: w.condition("Degraded").get("reason") == "KindMissing")
            w.api.serve(Kind("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"))
            await until(lambda: w.find("ServiceMonitor", "qwen"))
            await until(lambda: w.condition("Degraded").get("reason") == "AsWanted")
            # From then on it is watched like the others.
            await until(lambda: running.value("watch_restarts_total") == 1)
            w.delete("ServiceMonitor", "qwen")
            await until(lambda: w.find("ServiceMonitor", "qwen"))

    run(scenario)


def test_a_paused_service_is_left_as_it_is() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            w.apply(paused=True, replicas=3)
            await until(lambda: w.get("InferenceService", "qwen").get("status", {}).get("mode") == "Paused")
            w.delete("ConfigMap", "qwen-openai")
            await w.settled()
            assert not w.find("ConfigMap", "qwen-openai")
            assert w.get("Deployment", "qwen-engine")["spec"]["replicas"] == 1

    run(scenario)


def test_a_namespace_that_is_being_deleted_is_left_quietly() -> None:
    async def scenario(w: World) -> None:
        namespaces = w.api.kind("Namespace")
        w.api.store.create(namespaces, None, {"metadata": {"name": "going", "finalizers": ["kubernetes"]}})
        async with w.operator(replace(SETTINGS, namespaces=("going",))) as running:
            w.apply(namespace="going")
            w.api.store.delete(namespaces, None, "going")
            await until(lambda: applied(w))
            await w.settled()
            assert running.value("reconcile_errors_total", error="Refused") == 0
            assert running.value("queue_depth") == 0

    run(scenario)


def test_what_is_applied_is_ours_and_another_managers_fields_stay_theirs() -> None:
    async def scenario(w: World) -> None:
        async with w.operator():
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            for (kind, _), child in w.children().items():
                managers = [(one["manager"], one["operation"]) for one in child["metadata"]["managedFields"]]
                assert managers == [(FIELD_MANAGER, "Update" if kind == "Secret" else "Apply")]

    run(scenario)


def test_nothing_is_written_while_nothing_changes() -> None:
    async def scenario(w: World) -> None:
        often = replace(SETTINGS, timing=replace(SETTINGS.timing, resync=0.05))
        async with w.operator(often) as running:
            w.apply()
            await until(lambda: set(w.children()) == CHILDREN)
            await w.settled()
            before, looks = len(w.api.writes()), running.value("reconcile_seconds_count")
            await until(lambda: running.value("reconcile_seconds_count") >= looks + 5)
            assert len(w.api.writes()) == before

    run(scenario)


def test_a_clean_stop_ends_in_time_and_the_probes_answer_until_then() -> None:
    async def scenario(w: World) -> None:
        async with w.operator() as running:
            w.apply()
            await until(lambda: w.condition("Ready"))
            assert running.operator.port > 0
            async with asyncio.timeout(120):
                await running.stop()

    run(scenario)


def test_an_operator_that_is_stopped_while_it_starts_leaves_nothing_behind() -> None:
    """kopf starts tasks while it is being ended, which would ask the API server for ever."""

    async def scenario(w: World) -> None:
        w.apply()
        for turns in range(0, 40, 4):
            async with w.operator() as running:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await running.stop()
                left = [task for task in asyncio.all_tasks() if "kopf" in str(task.get_coro())]
                assert not left, turns

    run(scenario)
