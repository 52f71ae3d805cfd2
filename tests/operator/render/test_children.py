"""Rules that hold for the children of every InferenceService of the table."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pagefleet_operator.plan.observed import Child, Observed
from pagefleet_operator.render.children import ChildContext, wanted_children
from pagefleet_operator.render.engine_groups import count_engines
from pagefleet_operator.render.labels import selector
from pagefleet_operator.render.model_job import model_job
from pagefleet_operator.render.revision import revision_of
from pagefleet_protocol.inference_status import InferenceServiceStatus, ScalingStatus
from pagefleet_protocol.kube_names import (
    ANNOTATION_APPLIED,
    COMPILED_FOLDER,
    LABEL_REVISION,
    LABEL_SERVICE,
    RESERVED_SUFFIXES,
)

from tests.operator.render.server_defaults import server_default
from tests.operator.render.service_table import HF, SETTINGS, TABLE, TINY, UID, Case, by_key

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Object = dict[str, Any]
ENGINE = ("Deployment", "qwen-engine")


def pod_templates(case: Case) -> Iterator[tuple[str, Object]]:
    for child in case.wanted():
        if child["kind"] in ("Deployment", "Job"):
            yield child["metadata"]["name"], child["spec"]["template"]


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def seen(case: Case, **child: Any) -> dict[tuple[str, str], Child]:
    """All that the case wants, as the API server has it after an apply."""
    return {key: Child(server_default(one), ours=True, **child) for key, one in by_key(case.wanted()).items()}


def engine(case: Case) -> Object:
    return by_key(case.wanted())[ENGINE]


@pytest.mark.parametrize("name", TABLE)
def test_every_child_has_owner_labels_and_hash(name: str) -> None:
    case = TABLE[name]
    keys = []
    for child in case.wanted():
        metadata = child["metadata"]
        keys.append((child["kind"], metadata["name"]))
        assert metadata["namespace"] == "apps"
        assert metadata["ownerReferences"][0]["uid"] == UID
        assert metadata["ownerReferences"][0]["controller"] is True
        assert metadata["ownerReferences"][0]["blockOwnerDeletion"] is False
        assert metadata["labels"][LABEL_SERVICE] == "qwen"
        assert len(metadata["annotations"][ANNOTATION_APPLIED]) == 16
        assert metadata["name"] == "qwen" or metadata["name"].removeprefix("qwen").startswith(RESERVED_SUFFIXES)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", TABLE)
def test_every_pod_is_restricted(name: str) -> None:
    for _, template in pod_templates(TABLE[name]):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["runAsUser"] == 65532
        for container in containers(template):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["runAsNonRoot"] is True
            assert security["readOnlyRootFilesystem"] is (container["name"] != "logs")


@pytest.mark.parametrize("name", TABLE)
def test_only_routers_get_a_token_and_only_downloads_get_credentials(name: str) -> None:
    for owner, template in pod_templates(TABLE[name]):
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        assert ("projected" in str(volumes)) == (owner == "qwen-router")
        for container in containers(template):
            secrets = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"}
            given = secrets & {one["name"] for one in container.get("env", ())}
            assert not given or container["name"] == "download"


@pytest.mark.parametrize("name", TABLE)
def test_every_mount_has_its_volume_and_every_volume_a_bound(name: str) -> None:
    for _, template in pod_templates(TABLE[name]):
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        assert len(volumes) == len(template["spec"]["volumes"])
        for container in containers(template):
            mounts = container.get("volumeMounts", [])
            assert {one["name"] for one in mounts} <= volumes.keys()
            assert len({one["mountPath"] for one in mounts}) == len(mounts)
        unbounded = [name for name, one in volumes.items() if one.get("emptyDir") == {}]
        assert unbounded in ([], ["model"])


@pytest.mark.parametrize("drain", [0, 30, 3600])
def test_a_pod_gets_more_time_than_it_takes_to_drain(drain: int) -> None:
    for _, template in pod_templates(TINY.changed(rollout={"drainSeconds": drain})):
        container = template["spec"]["containers"][0]
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        # A router outlasts engines: whatever they have not finished goes on through it.
        own = drain if container["name"] == "engine" else 2 * drain
        assert container["args"][container["args"].index("--drain-timeout") + 1] == str(own)
        assert template["spec"]["terminationGracePeriodSeconds"] > pause + own
        assert pause > 0


def test_a_slow_load_is_waited_for_and_a_fast_one_is_seen_at_once() -> None:
    probe = engine(TINY)["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] <= 2
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


@pytest.mark.parametrize("name", TABLE)
def test_the_plan_of_the_plans_result_changes_nothing(name: str) -> None:
    case = TABLE[name]
    again = replace(case, children=seen(case))
    assert again.wanted() == case.wanted()
    assert again.wanted() == again.wanted()


def test_revisions_are_on_the_pods() -> None:
    case = TABLE["gpu-hf-pvc"]
    revisions = revision_of(case.wanted())
    assert revisions.keys() == {"engine", "router"}
    assert revisions["engine"] == engine(case)["spec"]["template"]["metadata"]["labels"][LABEL_REVISION]
    assert all(len(one) == 10 for one in revisions.values())


@pytest.mark.parametrize(
    ("change", "renews"),
    [
        ({"replicas": 7}, set()),
        ({"monitoring": {"serviceMonitor": True}}, set()),
        ({"monitoring": {"tracesSample": 0.5}}, set()),
        ({"monitoring": {"tracesEndpoint": "http://c:4318"}}, {"engine", "router"}),
        ({"expose": {"type": "Ingress", "host": "a.example.org"}}, set()),
        ({"rollout": {"maxSurge": 2, "progressSeconds": 60}}, set()),
        ({"engine": {"maxModelLen": 64}}, {"engine"}),
        ({"engine": {"env": [{"name": "A", "value": "b"}]}}, {"engine"}),
        ({"podTemplate": {"metadata": {"labels": {"team": "a"}}}}, {"engine"}),
        ({"router": {"policy": "least-load"}}, {"router"}),
        ({"model": {"uri": "builtin://tiny", "aliases": ["other"]}}, {"engine", "router"}),
        ({"rollout": {"drainSeconds": 1}}, {"engine", "router"}),
    ],
)
def test_a_revision_changes_with_its_template_and_with_nothing_else(change: dict[str, Any], renews: set[str]) -> None:
    before, after = revision_of(TINY.wanted()), revision_of(TINY.changed(**change).wanted())
    assert {role for role in before if before[role] != after[role]} == renews


def test_replicas_that_an_autoscaler_set_are_kept() -> None:
    scaled = replace(TINY, children=seen(TINY, scaled_by="kube-controller-manager"))
    assert "replicas" not in engine(scaled)["spec"]
    assert engine(replace(TINY, children=seen(TINY)))["spec"]["replicas"] == 1


SEVERAL = replace(TABLE["several-nodes-cpu"], kinds=frozenset({"LeaderWorkerSet"}))
GROUPS = ("LeaderWorkerSet", "qwen-engine")


def in_between(now: Case, before: Case, scaled_by: str = "") -> Case:
    """What there is while one kind of engines replaces the other: the old one serves, the new one does not yet."""
    key, old = (GROUPS, ENGINE) if now is SEVERAL else (ENGINE, GROUPS)
    serves = {"readyReplicas": 1, "availableReplicas": 1}
    children = {
        key: Child(server_default(by_key(now.wanted())[key]), ours=True, scaled_by=scaled_by),
        old: Child(server_default(by_key(before.wanted())[old]) | {"status": serves}, ours=True),
    }
    return replace(now, children=children)


@pytest.mark.parametrize(("now", "before"), [(SEVERAL, TINY), (TINY, SEVERAL)])
def test_engines_of_the_other_kind_serve_until_new_ones_do_whoever_scales_these(now: Case, before: Case) -> None:
    made = by_key(in_between(now, before, scaled_by="keda").wanted())
    assert [made[key]["spec"]["replicas"] for key in (ENGINE, GROUPS)] == [1, 1]


def test_a_step_of_one_kind_replacing_the_other_is_no_number_of_engines() -> None:
    scaling = ScalingStatus(mode="Internal", current=3, desired=3, reason="Steady", at="2026-01-01T00:00:00Z")
    told = InferenceServiceStatus(observed_generation=1, model_name="qwen", scaling=scaling)
    case = in_between(SEVERAL, TINY)
    service = case.changed(autoscaling={"min": 1, "max": 4}, replicas=None).service
    assert count_engines(service, told, Observed(now=NOW, children=case.children)) == 3
    alone = {GROUPS: case.children[GROUPS]}
    assert count_engines(service, told, Observed(now=NOW, children=alone)) == 1, "applied, and not told yet"


@pytest.mark.parametrize("model_ready", [True, False])
@pytest.mark.parametrize(("now", "before"), [(SEVERAL, TINY), (TINY, SEVERAL)])
def test_the_revision_is_that_of_the_wanted_kind(now: Case, before: Case, model_ready: bool) -> None:
    children = replace(in_between(now, before), model_ready=model_ready).wanted()
    assert {ENGINE, GROUPS} <= by_key(children).keys()
    assert revision_of(children)["engine"] == revision_of(now.wanted())["engine"]


def test_the_topology_of_groups_is_part_of_their_revision() -> None:
    case = TABLE["several-nodes"]
    other = {"h100": {**case.profiles["h100"], "exclusiveTopology": "topology.kubernetes.io/rack"}}
    before, after = (one.wanted() for one in (case, replace(case, profiles=other)))
    assert revision_of(before)["engine"] != revision_of(after)["engine"]
    spec = by_key(after)[GROUPS]["spec"]["leaderWorkerTemplate"]
    for template in (spec["leaderTemplate"], spec["workerTemplate"]):
        assert template["metadata"]["annotations"]["pagefleet.dev/exclusive-topology"] == "topology.kubernetes.io/rack"


def test_followers_are_no_engines_whatever_pod_template_says() -> None:
    marks = {"metadata": {"labels": {"app.kubernetes.io/component": "engine", "team": "a"}}}
    spec = by_key(SEVERAL.changed(podTemplate=marks).wanted())[GROUPS]["spec"]["leaderWorkerTemplate"]
    found = [spec[one]["metadata"]["labels"] for one in ("leaderTemplate", "workerTemplate")]
    assert [(one["app.kubernetes.io/component"], one["team"]) for one in found] == [("engine", "a"), ("follower", "a")]


def test_a_scaled_deployment_of_somebody_else_is_not_asked() -> None:
    foreign = {ENGINE: Child(server_default(engine(TINY)), ours=False, scaled_by="keda")}
    assert engine(replace(TINY, children=foreign))["spec"]["replicas"] == 1


@pytest.mark.parametrize(("model_ready", "engine_allowed"), [(False, True), (True, False), (False, False)])
def test_engines_that_may_not_change_stay_as_they_are(model_ready: bool, engine_allowed: bool) -> None:
    changed = replace(TINY.changed(engine={"maxModelLen": 64}), model_ready=model_ready, engine_allowed=engine_allowed)
    assert ENGINE not in by_key(changed.wanted()), "there were none, and there are none"
    observed = seen(TINY)
    kept = engine(replace(changed, children=observed))
    body: Any = observed[ENGINE].body
    assert kept["spec"] == body["spec"]
    assert kept["metadata"]["annotations"] == body["metadata"]["annotations"]
    assert not {"uid", "resourceVersion"} & kept["metadata"].keys()
    assert "status" not in kept
    foreign = {ENGINE: Child(body, ours=False)}
    assert ENGINE not in by_key(replace(changed, children=foreign).wanted())


@pytest.mark.parametrize("state", ["refused", "downloads", "rolls", "has rolled"])
def test_ranks_that_still_serve_keep_their_ports(state: str) -> None:
    observed = seen(TINY.changed(parallelism={"data": 2}, resources={"gpus": 2}))
    changed = replace(TINY, children=observed, engine_allowed=state != "refused", model_ready=state != "downloads")
    body = dict(observed[ENGINE].body)
    if state in ("rolls", "has rolled"):
        body["spec"] = engine(changed)["spec"]
        count = body["spec"]["replicas"] = 1
        old = 1 if state == "rolls" else 0
        body["status"] = {
            "observedGeneration": 9,
            "updatedReplicas": count,
            "availableReplicas": count,
            "replicas": count + old,
        }
        observed[ENGINE] = replace(observed[ENGINE], body=body)
    wanted = by_key(changed.wanted())
    ports = [port["name"] for port in wanted["Service", "qwen-engine"]["spec"]["ports"]]
    allowed = str(wanted["NetworkPolicy", "qwen-engine"]["spec"]["ingress"])
    serves = state != "has rolled"
    assert ports == (["http", "http-1"] if serves else ["http"])
    assert ("8001" in allowed) == serves


def test_caches_of_ranks_behind_one_port_stay_reachable_until_their_pods_are_gone() -> None:
    observed = seen(HF.changed(parallelism={"data": 4, "expert": True}, resources={"cpu": "4"}))
    changed = replace(HF.changed(parallelism={"data": 2, "expert": True}, resources={"cpu": "4"}), children=observed)

    def last_is_reached() -> set[bool]:
        policies = by_key(changed.wanted())
        sides = (("qwen-engine", "ingress"), ("qwen-router", "egress"))
        return {"8112" in str(policies["NetworkPolicy", name]["spec"][side]) for name, side in sides}

    assert last_is_reached() == {True}, "the template has four yet"
    body: Any = observed[ENGINE].body
    body["spec"] = engine(changed)["spec"]
    count = body["spec"]["replicas"]
    body["status"] = {
        "observedGeneration": 9,
        "updatedReplicas": count,
        "availableReplicas": count,
        "replicas": count + 1,
    }
    assert last_is_reached() == {True}, "a pod of before serves yet"
    body["status"]["replicas"] = count
    assert last_is_reached() == {False}


def test_a_pair_that_leaves_is_asked_for_the_k_v_of_all_its_ranks() -> None:
    of_four, of_two = (TINY.changed(disaggregation={}, parallelism={"data": count, "expert": True}) for count in (4, 2))
    service = by_key(replace(of_two, children=seen(of_four)).wanted())["Service", "qwen-prefill"]
    assert [port["name"] for port in service["spec"]["ports"]][-1] == "kv-data-3"
    service = by_key(replace(of_two, children=seen(of_two)).wanted())["Service", "qwen-prefill"]
    assert [port["name"] for port in service["spec"]["ports"]][-1] == "kv-data-1"


def test_what_comes_from_a_list_is_named_again() -> None:
    observed = seen(TINY)
    body = {name: value for name, value in observed[ENGINE].body.items() if name not in ("kind", "apiVersion")}
    kept = engine(replace(TINY, children={ENGINE: Child(body, ours=True)}, model_ready=False))
    assert (kept["apiVersion"], kept["kind"]) == ("apps/v1", "Deployment")


def job(case: Case) -> Object:
    found = [one for one in case.wanted() if one["kind"] == "Job"]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "hf://Qwen/Qwen3-4B"}},
        {"model": {"uri": "hf://Qwen/Qwen3-8B", "revision": "v2"}},
        {"model": {"uri": "hf://Qwen/Qwen3-8B", "endpoint": "https://mirror.example.org"}},
        {"model": {"uri": "hf://Qwen/Qwen3-8B", "secretRef": {"name": "hub"}}},
        {"cache": {"type": "pvc"}},
        {"cache": {"type": "pvc", "claim": "models"}},
    ],
)
def test_another_model_or_place_is_another_job(change: dict[str, Any]) -> None:
    assert job(HF.changed(**change))["metadata"]["name"] != job(HF)["metadata"]["name"]


def test_what_the_job_finds_out_does_not_make_another_job() -> None:
    assert job(replace(HF, facts=None)) == job(HF)
    assert job(HF.changed(replicas=3, engine={"dtype": "float16"})) == job(HF)


def test_a_job_of_another_version_of_the_operator_is_left_alone() -> None:
    observed = seen(HF)
    upgraded = replace(HF, settings=replace(HF.settings, operator_image="pagefleet-operator:2"), children=observed)
    kept = job(upgraded)
    assert kept["spec"]["template"]["spec"]["containers"][0]["image"] == "pagefleet-operator:1"
    assert kept["metadata"]["annotations"] == job(HF)["metadata"]["annotations"]
    fresh = job(replace(upgraded, children={}))
    assert fresh["spec"]["template"]["spec"]["containers"][0]["image"] == "pagefleet-operator:2"
    assert fresh["metadata"]["name"] == kept["metadata"]["name"]


@pytest.mark.parametrize("name", ["hf-in-every-pod", "gpu-hf-pvc"])
def test_a_mistake_ends_the_job_and_a_lost_node_does_not_count(name: str) -> None:
    spec = job(TABLE[name])["spec"]
    fail, ignore = spec["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob"
    assert fail["onExitCodes"]["values"] == [2]
    assert fail["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert ignore["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "activeDeadlineSeconds" not in spec
    assert "ttlSecondsAfterFinished" not in spec


@pytest.mark.parametrize("name", ["s3-into-a-given-claim", "gpu-hf-pvc"])
def test_engines_read_what_the_job_wrote(name: str) -> None:
    case = TABLE[name]
    folder = job(case)["spec"]["template"]["spec"]["containers"][0]["args"][2]
    container = engine(case)["spec"]["template"]["spec"]["containers"][0]
    mount = next(one for one in container["volumeMounts"] if one["mountPath"] == "/models/model")
    assert folder == f"/models/{mount['subPath']}"
    assert mount["readOnly"] is True
    assert "/models/model" in container["args"]


def kept(case: Case) -> tuple[str, Object]:
    """Where an engine keeps what it compiles, as its flag says, and the mount behind it; empty: in /tmp."""
    container = engine(case)["spec"]["template"]["spec"]["containers"][0]
    args = container["args"]
    place = args[args.index("--cache-dir") + 1] if "--cache-dir" in args else ""
    return place, next((one for one in container["volumeMounts"] if one["mountPath"] == place), {})


def test_engines_with_gpus_keep_what_they_compile_beside_the_model_that_the_job_brought() -> None:
    case = TABLE["gpu-hf-pvc"]
    folder = job(case)["spec"]["template"]["spec"]["containers"][0]["args"][2]
    place, mount = kept(case)
    assert f"/models/{mount['subPath']}" == f"{folder}/{COMPILED_FOLDER}", "which the job makes, as its own user"
    assert "readOnly" not in mount
    assert mount["name"] == "model"
    assert place
    volume = next(one for one in engine(case)["spec"]["template"]["spec"]["volumes"] if one["name"] == "model")
    assert "readOnly" not in volume["persistentVolumeClaim"]


def test_the_users_cache_dir_wins_over_the_models_volume() -> None:
    args = engine(TABLE["gpu-hf-pvc"].changed(engine={"args": ["--cache-dir", "/mine"]}))
    found = args["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [found[at + 1] for at, word in enumerate(found) if word == "--cache-dir"][-1] == "/mine"


@pytest.mark.parametrize("name", ["s3-into-a-given-claim", "pvc", "gs-hostpath", "hf-in-every-pod", "oci"])
def test_elsewhere_nothing_but_the_download_writes_to_the_models_volume(name: str) -> None:
    """Without a GPU there is nothing to keep; a node's folder is shared with services of other namespaces."""
    case = TABLE[name]
    gpus = {} if name == "s3-into-a-given-claim" else {"resources": {"gpus": 1}}
    assert kept(case.changed(**gpus)) == ("", {})
    container = engine(case.changed(**gpus))["spec"]["template"]["spec"]["containers"][0]
    assert all(one.get("readOnly") for one in container["volumeMounts"] if one["name"] == "model")
    assert "TRITON_CACHE_DIR" not in {one["name"] for one in container["env"]}, "or --cache-dir would not count"


def test_another_model_goes_into_another_folder_of_the_claim() -> None:
    folders = set()
    for uri in ("hf://Qwen/Qwen3-8B", "hf://Qwen/Qwen3-4B"):
        for revision in ("main", "v2"):
            case = HF.changed(model={"uri": uri, "revision": revision}, cache={"type": "pvc"})
            folders.add(job(case)["spec"]["template"]["spec"]["containers"][0]["args"][2])
    assert len(folders) == 4


def test_all_engines_load_the_commit_that_was_found() -> None:
    init = engine(HF)["spec"]["template"]["spec"]["initContainers"][0]
    assert any(argument.startswith("--revision=c0ffee") for argument in init["args"])


def test_a_mirror_of_the_administrator_is_used_for_the_hub_alone() -> None:
    settings = replace(HF.settings, hf_endpoint="https://mirror.example.org")
    assert (
        "https://mirror.example.org"
        in job(replace(HF, settings=settings))["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    s3 = replace(TABLE["s3-into-a-given-claim"], settings=settings)
    assert "https://mirror.example.org" not in str(job(s3))


@pytest.mark.parametrize(("scheme", "name"), [("s3", "AWS_SKIP_SIGNATURE"), ("gs", "GOOGLE_SKIP_SIGNATURE")])
def test_a_bucket_without_a_secret_is_read_as_everybody_may(scheme: str, name: str) -> None:
    public = HF.changed(model={"uri": f"{scheme}://models/qwen"})
    secret = public.changed(model={"uri": f"{scheme}://models/qwen", "secretRef": {"name": "store"}})
    open_network = replace(public, settings=replace(SETTINGS, network_policies=False))
    for case, unsigned in ((public, True), (secret, False), (open_network, False)):
        downloads = (
            job(case)["spec"]["template"]["spec"]["containers"]
            + engine(case)["spec"]["template"]["spec"]["initContainers"]
        )
        assert len(downloads) == 2
        assert [{"name": name, "value": "true"} in one["env"] for one in downloads] == [unsigned] * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gateway", "HTTPRoute"),
        ("gateway", "ServiceMonitor"),
        ("ingress", "Ingress"),
        ("inference-pool", "InferencePool"),
    ],
)
def test_kinds_that_the_cluster_lacks_are_not_made(name: str, kind: str) -> None:
    case = TABLE[name]
    assert (kind, "qwen") in by_key(case.wanted())
    assert (kind, "qwen") not in by_key(replace(case, kinds=case.kinds - {kind}).wanted())


def test_a_route_goes_to_the_pool_where_there_is_one_and_else_to_the_routers() -> None:
    case = TABLE["inference-pool"]
    (backend,) = by_key(case.wanted())["HTTPRoute", "qwen"]["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen"}
    without = by_key(replace(case, kinds=frozenset({"HTTPRoute"})).wanted())
    assert without["HTTPRoute", "qwen"]["spec"]["rules"][0]["backendRefs"] == [{"name": "qwen", "port": 80}]


def test_a_pool_selects_the_engines_and_asks_the_routers() -> None:
    children = by_key(TABLE["inference-pool"].wanted())
    pool, service = children["InferencePool", "qwen"]["spec"], children["Service", "qwen"]["spec"]
    engine_pods = children[ENGINE]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= engine_pods["metadata"]["labels"].items()
    assert pool["targetPorts"] == [{"number": engine_pods["spec"]["containers"][0]["ports"][0]["containerPort"]}]
    asked = pool["endpointPickerRef"]
    (port,) = [one for one in service["ports"] if one["port"] == asked["port"]["number"]]
    assert asked["name"] == "qwen"
    (router,) = children["Deployment", "qwen-router"]["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": 9002, "protocol": "TCP"} in router["ports"]
    assert router["args"][router["args"].index("--endpoint-picker-port") + 1] == "9002"
    sources = children["NetworkPolicy", "qwen-engine"]["spec"]["ingress"][0]["from"]
    assert {"ipBlock": {"cidr": "10.1.0.0/16"}} in sources
    assert len(sources) == 4
    clients, gateways = children["NetworkPolicy", "qwen-router"]["spec"]["ingress"]
    assert clients == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert gateways == {"from": sources[1:], "ports": [{"port": 9002, "protocol": "TCP"}]}
    plain = TABLE["inference-pool"].changed(router={"inferencePool": {"tls": False}})
    (router,) = by_key(plain.wanted())["Deployment", "qwen-router"]["spec"]["template"]["spec"]["containers"]
    assert "--no-endpoint-picker-tls" in router["args"]


def test_network_policies_can_be_left_to_others() -> None:
    kinds = {one["kind"] for one in TABLE["scaled-to-zero"].wanted()}
    assert "NetworkPolicy" not in kinds


def test_routers_reach_the_api_server_on_its_ports() -> None:
    case = replace(TINY, settings=replace(SETTINGS, api_server_port=(16443,)))
    names, engines, api_server = by_key(case.wanted())["NetworkPolicy", "qwen-router"]["spec"]["egress"]
    assert api_server == {"ports": [{"port": 16443, "protocol": "TCP"}]}
    assert "to" not in names
    assert engines["to"] == [{"podSelector": {"matchLabels": selector("qwen", "engine")}}]


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://c.mon:4318", 4318), ("https://c/v1/traces", 443), ("http://[fd00::1]/x", 80)]
)
def test_traces_go_out_to_the_port_of_their_collector(endpoint: str, port: int) -> None:
    children = by_key(TINY.changed(monitoring={"tracesEndpoint": endpoint, "tracesSample": 0.05}).wanted())
    for component in ("engine", "router"):
        egress = children["NetworkPolicy", f"qwen-{component}"]["spec"]["egress"]
        assert egress[-1]["ports"] == [{"port": port, "protocol": "TCP"}]
        assert "169.254.169.254/32" in str(egress[-1]["to"])
        (container,) = children["Deployment", f"qwen-{component}"]["spec"]["template"]["spec"]["containers"]
        words = container["args"]
        assert words[words.index("--otlp-traces-endpoint") + 1] == endpoint
        assert words[words.index("--otlp-traces-sample") + 1] == "0.05"


@pytest.mark.parametrize("name", TABLE)
def test_only_downloads_reach_the_world_and_never_a_clouds_metadata(name: str) -> None:
    case = TABLE[name]
    children = by_key(case.wanted())
    for component in ("engine", "model"):
        policy = children.get(("NetworkPolicy", f"qwen-{component}"))
        if policy is None:
            continue
        wide = [rule for rule in policy["spec"]["egress"] if "to" in rule]
        remote = case.resolved.uri.remote
        downloads = remote and (component == "model" or case.resolved.cache in ("none", "hostPath"))
        assert bool(wide) == downloads
        for peer in (peer for rule in wide for peer in rule["to"] if "ipBlock" in peer):
            assert peer["ipBlock"]["except"] in (["169.254.169.254/32"], ["fd00:ec2::254/128"])


def test_engines_are_reached_by_their_own_routers_alone_and_downloads_by_the_operator() -> None:
    children = by_key(HF.wanted())
    http, events = children["NetworkPolicy", "qwen-engine"]["spec"]["ingress"]
    assert http["from"] == events["from"] == [{"podSelector": {"matchLabels": selector("qwen", "router")}}]
    assert [one["port"] for one in http["ports"]] == [8000]
    assert [one["port"] for one in events["ports"]] == [8100, 8101]
    (rule,) = children["NetworkPolicy", "qwen-model"]["spec"]["ingress"]
    (operator,) = rule["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "pagefleet"}


@pytest.mark.parametrize(("progress_s", "start_s"), [(1800, 3600), (7200, 7200)])
def test_an_engine_is_not_ended_before_its_rollout_has_failed(progress_s: int, start_s: int) -> None:
    deployment = engine(TINY.changed(rollout={"progressSeconds": progress_s}))["spec"]
    probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == start_s >= deployment["progressDeadlineSeconds"]


@pytest.mark.parametrize(
    ("patch", "found"),
    [
        ({"spec": {"imagePullSecrets": [{"name": "team"}, {"name": "registry"}]}}, ["registry", "team"]),
        (
            {"spec": {"imagePullSecrets": [{"name": "registry", "$patch": "delete"}, {"$patch": "replace"}]}},
            ["registry"],
        ),
        ({"spec": {"imagePullSecrets": "team"}}, ["registry"]),
        ({"spec": ["team"]}, ["registry"]),
        ({}, ["registry"]),
    ],
)
def test_a_private_model_image_is_looked_at_with_the_secrets_of_pod_template(patch: Any, found: list[str]) -> None:
    case = replace(TABLE["oci"].changed(podTemplate=patch), settings=replace(SETTINGS, image_pull_secret=("registry",)))
    spec = model_job(case.service, case.resolved, case.settings)["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["imagePullSecrets"]] == found


def test_other_pull_secrets_of_a_model_image_are_another_look() -> None:
    with_secret = TABLE["oci"].changed(podTemplate={"spec": {"imagePullSecrets": [{"name": "team"}]}})
    assert job(with_secret)["metadata"]["name"] != job(TABLE["oci"])["metadata"]["name"]


def test_selectors_never_hold_more_than_can_stay_for_ever() -> None:
    spec = engine(TABLE["pod-template"])["spec"]
    assert spec["selector"]["matchLabels"].keys() == {LABEL_SERVICE, "app.kubernetes.io/component"}
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_rendering_changes_nothing_it_was_given() -> None:
    case = TABLE["pod-template"]
    service, resolved = case.service, case.resolved
    before = copy.deepcopy(service.spec.pod_template)
    context = ChildContext(children={}, optional_kinds=frozenset(), model_ready=True, engines=1)
    first = wanted_children(service, resolved, case.settings, context)
    first[-1]["spec"]["template"]["spec"]["containers"].clear()
    assert service.spec.pod_template == before
    assert wanted_children(service, resolved, case.settings, context)[-1]["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize(("cpu", "threads"), [(None, None), ("500m", "1"), ("1500m", "2"), ("4", "4")])
def test_an_engine_on_the_cpu_computes_with_as_many_threads_as_it_has_cores(
    cpu: str | None, threads: str | None
) -> None:
    args = engine(TINY.changed(resources={"cpu": cpu} if cpu else {}))["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    found = args[args.index("--num-threads") + 1] if "--num-threads" in args else None
    assert found == threads


def test_the_users_flags_and_variables_win_over_ours() -> None:
    case = TINY.changed(
        engine={"args": ["--num-threads", "8"], "env": [{"name": "OMP_WAIT_POLICY", "value": "ACTIVE"}]},
        resources={"cpu": "2"},
    )
    container = engine(case)["spec"]["template"]["spec"]["containers"][0]
    places = [number for number, arg in enumerate(container["args"]) if arg == "--num-threads"]
    assert [container["args"][number + 1] for number in places] == ["2", "8"]
    values = [one["value"] for one in container["env"] if one["name"] == "OMP_WAIT_POLICY"]
    assert values == ["ACTIVE"]
