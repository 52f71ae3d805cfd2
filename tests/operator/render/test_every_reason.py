"""Every reason is given somewhere, and explained: one situation for each, through the whole plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.canary import RevisionFigures, TrialFigures
from pagefleet_operator.plan.kv_link import KvEngineSeen
from pagefleet_operator.plan.observed import ApplyFailure, Child, Observed, PodSeen, ScalingSeen
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.status import invalid_service_status
from pagefleet_operator.render.service_plan import plan_service
from pagefleet_protocol.field_errors import FieldError, InvalidDocument
from pagefleet_protocol.inference_status import ConditionType, InferenceServiceStatus
from pagefleet_protocol.model_facts import Progress

from tests.operator.plan.kube_world import (
    FACTS,
    GIB,
    HF,
    NOW,
    SETTINGS,
    World,
    condition,
    container,
    event,
    pod,
    profile,
    result,
    service,
    told,
)

CHAPTERS = Path(__file__).parents[3] / "docs/troubleshooting.md"
CLAIM = {**HF, "cache": {"type": "pvc"}}
TWO = {"replicas": 2}


def serving(**spec: Any) -> World:
    """Return a service that has settled."""
    world = World(service(**spec))
    world.settle()
    return world


def engines(world: World, **seen: Any) -> InferenceServiceStatus:
    """Return the status when every engine is like this."""
    world.pods = [replace(one, **({"ready": False} | seen)) if one.component == "engine" else one for one in world.pods]
    return world.plan().status


def tried_out(well: bool) -> InferenceServiceStatus:
    """Return the status while a revision is tried out, or once it went back."""
    world = serving(rollout={"canary": {}})
    world.edit(rollout={"canary": {}}, engine={"maxModelLen": 512})
    world.trial = None if well else TrialFigures(RevisionFigures(failed=9))
    for _ in range(3 if well else 6):
        world.step()
    assert world.status is not None
    return world.status


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containers": (container(state="waiting", reason=reason, message=message),)}


def ended(code: int, words: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"containers": (container(state="terminated", exit_code=code, reason=reason, message=words),)}


def job(said: str = "", **seen: Any) -> InferenceServiceStatus:
    """Return the status when the model job's pod is like this, or ended with this reason."""
    world = World(service(**CLAIM))
    world.step()
    if said:
        seen = {
            "phase": "Failed",
            "containers": (container("download", state="terminated", exit_code=2, message=result(said, "so it is")),),
        }
    world.pods = [replace(one, **seen) if one.component == "model" else one for one in world.pods]
    return world.plan().status


def linked(compatibility: str, **peers: int) -> InferenceServiceStatus:
    """Return the status of one pair, whose decode engine says this."""
    world = serving(disaggregation={})
    world.kv_engines = (
        KvEngineSeen("qwen-prefill-a", "prefill", "one"),
        KvEngineSeen("qwen-decode-a", "decode", compatibility, peers),
    )
    return world.plan().status


def failed_job() -> InferenceServiceStatus:
    world = World(service(**HF))
    world.step()
    world.pods = [one for one in world.pods if one.component != "model"]
    [body] = [body for (kind, _), body in world.children.items() if kind == "Job"]
    body["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "backoff limit"}]}
    return world.plan().status


def refused_creation(message: str) -> InferenceServiceStatus:
    world = serving()
    world.pods = world.of("router")
    world.children["Deployment", "qwen-engine"]["status"] = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]
    }
    return world.plan().status


def rollout(**seen: Any) -> InferenceServiceStatus:
    """Return the status of an edit whose first new pod is like this."""
    world = serving()
    world.edit(engine={"args": ["--seed", "1"]})
    world.breaks = {world.plan().status.roles[0].revision: lambda one: replace(one, **seen)}
    for _ in range(5):
        world.step()
    assert world.status is not None
    return world.status


def unready() -> InferenceServiceStatus:
    world = serving()
    world.events = (event("Unhealthy", "Readiness probe failed: 503", world.of("engine")[0].name),)
    return engines(world)


def seen(**observed: Any) -> InferenceServiceStatus:
    """Return the status of a service of which only this was seen."""
    spec = observed.pop("spec", {})
    return plan_service(service(**spec), None, Observed(now=NOW, **observed), SETTINGS).status


def downloading() -> InferenceServiceStatus:
    world = World(service(**CLAIM))
    world.step()
    observed = replace(world.observed(), progress=Progress("downloading", 42 * GIB, 100 * GIB, 3, 9))
    return plan_service(world.service, None, observed, SETTINGS).status


def invalid() -> InferenceServiceStatus:
    problems = InvalidDocument([FieldError(("spec", "model", "uri"), "is required")])
    return invalid_service_status(("ns", "qwen"), problems, None, Observed(now=NOW))


def strangers() -> InferenceServiceStatus:
    world = World(service())
    world.strangers["Service", "qwen"] = {"kind": "Service", "metadata": {"name": "qwen", "namespace": "ns"}}
    return world.plan().status


def volume() -> InferenceServiceStatus:
    world = serving()
    [engine] = world.of("engine")
    world.events = (event("FailedMount", "no such volume", engine.name),)
    return engines(world, **waiting("ContainerCreating"))


def node_lost() -> InferenceServiceStatus:
    world = serving()
    [engine] = world.of("engine")
    world.events = (event("NodeNotReady", "Node is not ready", engine.name),)
    return engines(world, deleting=True)


def partly() -> InferenceServiceStatus:
    world = serving(**TWO)
    first, *_ = world.of("engine")
    world.pods = [replace(one, ready=one.name != first.name) for one in world.pods]
    return world.plan().status


def too_large() -> InferenceServiceStatus:
    small = profile("small", gpuMemory="20Gi")
    world = World(
        service(**HF, profileRef={"name": "small"}, engine={"maxModelLen": 131072}, resources={"gpus": 1}),
        profiles={"small": small},
        facts=msgspec.structs.replace(FACTS, weights_bytes=15 * GIB),
    )
    return world.settle()


TO_ZERO = {"max": 4, "scaleToZero": {}}


def scaled(reason: str, desired: int, autoscaling: dict[str, Any] | None = None) -> InferenceServiceStatus:
    """Return the status after a decision of the autoscaler was carried out."""
    world = serving(autoscaling=autoscaling or TO_ZERO)
    world.scaling = ScalingSeen(desired, reason, "so it is")
    return world.settle()


def woken() -> InferenceServiceStatus:
    """Return the status when the first request after a scale to zero has come."""
    world = serving(autoscaling=TO_ZERO)
    world.scaling = ScalingSeen(0, "Idle", "nobody asks")
    world.settle()
    world.scaling = ScalingSeen(1, "WokenUp", "1 request waits")
    plan = world.plan()
    world.status = plan.status
    return world.plan().status


Case = tuple[ConditionType, str, Callable[[], InferenceServiceStatus], str]
CASES: dict[Reason, Case] = {
    Reason.SERVING: ("Ready", "True", lambda: serving().settle(), "http://qwen.ns.svc.cluster.local"),
    Reason.ALL_READY: ("EngineReady", "True", lambda: serving(**TWO).settle(), "2 of 2 engines ready"),
    Reason.CACHED: ("ModelCached", "True", lambda: serving(**CLAIM).settle(), "16.0 GiB of weights, revision c0ffee"),
    Reason.NOT_NEEDED: ("ModelCached", "True", lambda: serving().settle(), "in the engines' image"),
    Reason.SETTLED: ("Progressing", "False", lambda: serving().settle(), "as the spec says"),
    Reason.AS_WANTED: ("Degraded", "False", lambda: serving().settle(), "as the spec wants"),
    Reason.STARTING: ("EngineReady", "False", lambda: engines(serving(), **waiting("ContainerCreating")), "n1"),
    Reason.LOADING_MODEL: ("EngineReady", "False", lambda: engines(serving()), "loads the model"),
    Reason.INSPECTING: ("ModelCached", "False", lambda: seen(spec=HF), "looks at the model"),
    Reason.DOWNLOADING: ("ModelCached", "False", downloading, "42 %, 42.0 of 100.0 GiB, 3 of 9 files"),
    Reason.WAITING_FOR_MODEL: ("EngineReady", "False", lambda: seen(spec=CLAIM), "engines wait for the model"),
    Reason.ROLLING_OUT: ("Progressing", "True", rollout, "1 of 1 engines run the new settings"),
    Reason.CANARY: ("Progressing", "True", lambda: tried_out(True), "step 1 of 3: the new revision gets 5 %"),
    Reason.SCALING: ("Progressing", "True", seen, "0 engines exist, 1 are wanted"),
    Reason.SCALED_BY_DEMAND: ("ScalingActive", "True", lambda: scaled("Steady", 1), "follows the demand"),
    Reason.IDLE: ("Ready", "True", lambda: scaled("Idle", 0), "waits for an engine to start"),
    Reason.WAKING: ("Ready", "True", woken, "0 of 1 engines ready"),
    Reason.AT_MAXIMUM: ("ScalingActive", "True", lambda: scaled("AtMaximum", 4), "4 engines are wanted: so it is"),
    Reason.AT_QUOTA: ("ScalingActive", "True", lambda: scaled("AtQuota", 2), "2 engines are wanted: so it is"),
    Reason.ADVISED: ("ScalingActive", "True",
        lambda: scaled("Steady", 3, {"max": 4, "mode": "Advisory"}), "3 engines would be wanted"),
    Reason.SCALED_OUTSIDE: ("ScalingActive", "True",
        lambda: scaled("", 1, {"mode": "External"}), "scale subresource"),
    Reason.SIGNALS_MISSING: ("ScalingActive", "False", lambda: scaled("SignalsMissing", 2), "so it is"),
    Reason.WAITING: ("Progressing", "False", lambda: engines(serving(), **ended(1)), "EngineReady says why"),
    Reason.KV_LINKED: ("KVLinkReady", "True", lambda: linked("one"), "1 decode engine takes K/V from 1 prefill engine"),
    Reason.KV_INCOMPATIBLE: ("KVLinkReady", "False", lambda: linked("two"), "K/V of another form"),
    Reason.KV_LINK_DOWN: ("KVLinkReady", "False", lambda: linked("one", dead=2), "does not reach any of the 2"),
    Reason.SCALED_TO_ZERO: ("Ready", "False", lambda: serving(replicas=0).settle(), "set it to 1 or more"),
    Reason.PAUSED: ("Progressing", "False", lambda: seen(spec={"paused": True}), "set it to false"),
    Reason.MODEL_NOT_FOUND: ("ModelCached", "False", lambda: job("ModelNotFound"), "so it is"),
    Reason.ACCESS_DENIED: ("ModelCached", "False", lambda: job("AccessDenied"), "so it is"),
    Reason.STORE_UNREACHABLE: ("ModelCached", "False", lambda: job("StoreUnreachable"), "so it is"),
    Reason.CHECKSUM_MISMATCH: ("ModelCached", "False", lambda: job("ChecksumMismatch"), "so it is"),
    Reason.DISK_FULL: ("ModelCached", "False", lambda: job("DiskFull"), "so it is"),
    Reason.BAD_MODEL: ("ModelCached", "False", lambda: job("BadModel"), "so it is"),
    Reason.CLAIM_MISSING: ("ModelCached", "False",
        lambda: job(node="", unschedulable='0/1: persistentvolumeclaim "models" not found.'), "claim models"),
    Reason.CLAIM_PENDING: ("ModelCached", "False",
        lambda: job(node="", unschedulable="0/1: pod has unbound immediate PersistentVolumeClaims."), "describe pvc"),
    Reason.JOB_FAILED: ("ModelCached", "False", failed_job, "backoff limit"),
    Reason.NOT_READY: ("EngineReady", "False", unready, "runs but takes no requests"),
    Reason.INSUFFICIENT_GPU: ("EngineReady", "False",
        lambda: engines(serving(), node="", unschedulable="0/1: 1 Insufficient nvidia.com/gpu."), "nvidia.com/gpu"),
    Reason.UNSCHEDULABLE: ("EngineReady", "False",
        lambda: engines(serving(), node="", unschedulable="0/1: 1 Insufficient cpu."), "Insufficient cpu"),
    Reason.IMAGE_PULL_FAILED: ("Ready", "False",
        lambda: engines(serving(), **waiting("ErrImagePull", "manifest unknown")), "manifest unknown"),
    Reason.CRASH_LOOP: ("Ready", "False", lambda: engines(serving(), **ended(139)), "139"),
    Reason.OUT_OF_MEMORY: ("Ready", "False", lambda: engines(serving(), **ended(137, "", "OOMKilled")), "memory"),
    Reason.MODEL_LOAD_FAILED: ("Ready", "False",
        lambda: engines(serving(), **ended(3, "config.json is missing")), "config.json is missing"),
    Reason.SETTINGS_REFUSED: ("Ready", "False", lambda: engines(serving(), **ended(2, "max is 1")), "max is 1"),
    Reason.SECRET_MISSING: ("EngineReady", "False",
        lambda: engines(serving(), **waiting("CreateContainerConfigError", 'secret "s" not found')), "Secret s"),
    Reason.VOLUME_FAILED: ("EngineReady", "False", volume, "no such volume"),
    Reason.QUOTA_EXCEEDED: ("EngineReady", "False",
        lambda: refused_creation('pods "a" is forbidden: exceeded quota: few'), "exceeded quota: few"),
    Reason.POD_FORBIDDEN: ("EngineReady", "False",
        lambda: refused_creation('pods "a" is forbidden: violates PodSecurity "restricted"'), "violates PodSecurity"),
    Reason.NODE_LOST: ("EngineReady", "False", node_lost, "n1"),
    Reason.GPU_FAILED: ("EngineReady", "False",
        lambda: engines(serving(), phase="Failed", reason="UnexpectedAdmissionError", message="no GPU",
                        created=NOW), "no GPU"),
    Reason.PARTLY_READY: ("Degraded", "True", partly, "1 of 2 engines ready"),
    Reason.ROLLOUT_STOPPED: ("Degraded", "True", lambda: rollout(**ended(2, "bad")), "1 of 1 engines keep serving"),
    Reason.CANARY_FAILED: ("Degraded", "True", lambda: tried_out(False), "9 of its 9 requests fail"),
    Reason.INVALID_SPEC: ("Degraded", "True", invalid, "spec.model.uri: is required"),
    Reason.PROFILE_NOT_FOUND: ("Degraded", "True",
        lambda: seen(spec={"profileRef": {"name": "h"}}), "spec.profileRef.name: there is no InferenceProfile h"),
    Reason.PROFILE_INVALID: ("Degraded", "True",
        lambda: seen(spec={"profileRef": {"name": "h"}}, invalid_profiles={"h": "spec.gpuType: no"}), "gpuType: no"),
    Reason.NAME_TAKEN: ("Degraded", "True", strangers, "Service qwen"),
    Reason.NOT_ALLOWED: ("Degraded", "True",
        lambda: seen(spec={"podTemplate": {"spec": {"hostNetwork": True}}}), "hostNetwork"),
    Reason.KIND_MISSING: ("Degraded", "True",
        lambda: seen(spec={"monitoring": {"serviceMonitor": True}}), "Install the Prometheus operator"),
    Reason.APPLY_REFUSED: ("Degraded", "True",
        lambda: seen(failures=(ApplyFailure("Service", "qwen", 403, "Forbidden", "exceeded quota: s"),)),
        "refused Service qwen: exceeded quota: s. Have the namespace's ResourceQuota raised"),
    Reason.DOES_NOT_FIT: ("EngineReady", "False", too_large, "weights 15.0 GiB + KV cache"),
}  # fmt: skip


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_a_situation_gives_its_reason(reason: Reason) -> None:
    assert reason in CASES, "a reason without a case may be one that nothing gives"
    kind, status, situation, words = CASES[reason]
    found = situation()
    assert told(found, kind) == (status, reason), condition(found, kind)
    assert words in condition(found, kind).message


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_trouble_is_announced_as_a_warning(reason: Reason) -> None:
    kind, _, situation, _ = CASES[reason]
    status = situation()
    said = {one.reason: one for one in announcements(None, status)}
    if reason in said:
        assert said[reason].type == ("Normal" if reason in NORMAL else "Warning")
        assert said[reason].message in {one.message for one in status.conditions if one.reason == reason}
    else:
        assert reason in NORMAL or kind in ("EngineReady", "RouterReady") or reason is Reason.PARTLY_READY


def test_chapters_and_reasons_are_the_same() -> None:
    chapters = re.findall(r"^### (\w+)$", CHAPTERS.read_text(), flags=re.MULTILINE)
    assert sorted(chapters) == sorted(set(chapters))
    # Those of alerts are held by tests/chart/test_monitoring.py.
    assert {one for one in chapters if not one.startswith("Pagefleet")} == {str(one) for one in Reason}


def test_every_chapter_says_what_it_means_where_to_look_and_what_to_do() -> None:
    for chapter in re.split(r"^### ", CHAPTERS.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = chapter.partition("\n")
        body = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        for part in ("**Means**", "**Look**", "**Do**"):
            assert part in body, f"{title} has no {part}"


def test_old_pods_that_ended_say_nothing_about_now() -> None:
    world = serving(**TWO)
    [first, second] = world.of("engine")
    evicted = replace(first, phase="Failed", ready=False, reason="Evicted", message="memory")
    loading = replace(second, ready=False)

    def told_with(age: timedelta) -> tuple[str, str]:
        world.pods = [*world.of("router"), replace(evicted, created=world.now - age), loading]
        return told(world.plan().status, "EngineReady")

    assert told_with(timedelta(minutes=1)) == ("False", Reason.OUT_OF_MEMORY)
    assert told_with(timedelta(hours=1)) == ("False", Reason.LOADING_MODEL)


def test_a_child_of_another_is_no_source_of_truth() -> None:
    body = {
        "metadata": {"name": "qwen-engine"},
        "status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]},
    }
    status = seen(children={("Deployment", "qwen-engine"): Child(body=body, ours=False)})
    assert told(status, "Degraded") == ("True", Reason.NAME_TAKEN)
    assert told(status, "EngineReady") == ("False", Reason.STARTING)


def test_a_pod_with_no_component_of_ours_is_not_counted() -> None:
    stray: PodSeen = pod("qwen-model-x", ready=True)
    assert seen(pods=(stray,)).ready == "0/1"


@pytest.mark.parametrize(
    ("seen_pod", "reason"),
    [
        (
            {"unschedulable": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "containers": ()},
            "InsufficientGPU",
        ),
        (waiting("ImagePullBackOff", 'Back-off pulling image "x"'), "ImagePullFailed"),
        (ended(2, "unknown argument '--x'"), "SettingsRefused"),
        (ended(3, "file:///models/none: no such folder"), "ModelLoadFailed"),
    ],
)
def test_a_service_of_which_no_engine_can_start_is_degraded(seen_pod: dict[str, Any], reason: str) -> None:
    status = engines(serving(model={"uri": "file:///models/none"}), **seen_pod)
    assert told(status, "Degraded") == ("True", reason)
    assert told(status, "Ready") == ("False", reason)
    assert condition(status, "EngineReady").message.endswith(condition(status, "Degraded").message)


def test_a_download_that_is_refused_is_degraded() -> None:
    assert told(job("AccessDenied"), "Degraded") == ("True", "AccessDenied")


def test_an_engine_that_only_starts_is_not_degraded() -> None:
    assert told(engines(serving(), **waiting("ContainerCreating")), "Degraded") == ("False", "AsWanted")


def test_a_folder_that_the_image_does_not_hold_is_no_cached_model() -> None:
    world = serving(model={"uri": "file:///models/none"})
    status = engines(world, **ended(3, "file:///models/none: no such folder"))
    assert told(status, "ModelCached") == ("False", "ModelLoadFailed")
    assert "no such folder" in condition(status, "ModelCached").message
