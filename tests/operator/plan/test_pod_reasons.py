"""What Kubernetes says of pods, and what becomes of it. The texts are those of a real node, of Kubernetes 1.36."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pagefleet_operator.plan.observed import EventSeen, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog, pod_trouble, refused_pods, worst
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Trouble

from tests.operator.plan.kube_world import NOW, container, event, pod, result

BACK_OFF = "back-off 1m20s restarting failed container=engine pod=qwen-engine-a_ns(5d4e)"


def waiting(reason: str, message: str = "", name: str = "engine", **seen: Any) -> PodSeen:
    return pod(phase="Pending", containers=(container(name, state="waiting", reason=reason, message=message, **seen),))


def crashed(code: int, words: str = "", reason: str = "Error", name: str = "qwen-engine-a", **seen: Any) -> PodSeen:
    """Return a pod in its back-off."""
    component = "router" if "router" in name else "engine"
    last = {"last_exit_code": code, "last_reason": reason, "last_message": words, "restarts": 4, **seen}
    return pod(
        name,
        containers=(container(component, state="waiting", reason="CrashLoopBackOff", message=BACK_OFF, **last),),
    )


def unscheduled(message: str) -> PodSeen:
    return pod(phase="Pending", node="", unschedulable=message, containers=())


def creating(name: str = "engine") -> PodSeen:
    return waiting("ContainerCreating", name=name)


def trouble(seen: PodSeen, *events: EventSeen) -> Trouble:
    return pod_trouble(seen, EventLog(events), "ns")


PREEMPTION = (
    " no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
)
REGISTRY = (
    'failed to pull and unpack image "localhost:1/nope:1": failed to resolve image: failed to do request: Head '
    '"https://localhost:1/v2/nope/manifests/1": dial tcp 127.0.0.1:1: connect: connection refused'
)
RANK_DIED = """EngineDead: rank 1 on qwen-engine-a was killed by signal 9: the engine must be started again
2026-11-23 02:41:04 ERROR server: the engine core (pid 7) exited with status 1 with 3 open requests
"""
KILLED_BY_PROBE = (
    event("Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 503"),
    event("Killing", "Container engine failed liveness probe, will be restarted"),
    event("Unhealthy", "Startup probe failed: dial tcp 10.244.0.6:8000: connect: connection refused"),
)
CASES: dict[str, tuple[PodSeen, tuple[EventSeen, ...], Reason, tuple[str, ...]]] = {
    "no free GPU": (
        unscheduled(f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu.{PREEMPTION}"), (),
        Reason.INSUFFICIENT_GPU,
        (
            "no node has enough free nvidia.com/gpu for qwen-engine-a",
            "Insufficient nvidia.com/gpu. Free some",
            "allocatable.nvidia\\.com/gpu",
            "lower spec.replicas or spec.resources.gpus",
        ),
    ),
    "no free GPU among other things": (
        unscheduled("0/5 nodes are available: 2 Insufficient amd.com/gpu, 3 node(s) had untolerated taint {a: b}."), (),
        Reason.INSUFFICIENT_GPU, ("free amd.com/gpu",),
    ),
    "no node with the labels": (
        unscheduled(f"0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.{PREEMPTION}"), (),
        Reason.UNSCHEDULABLE, ("didn't match Pod's node affinity/selector", "nodeSelector"),
    ),
    "too little CPU": (
        unscheduled("0/1 nodes are available: 1 Insufficient cpu."), (), Reason.UNSCHEDULABLE,
        ("Insufficient cpu. Ask for less (spec.resources, spec.engine.kvOffload)",),
    ),
    "claim missing": (
        unscheduled('0/1 nodes are available: persistentvolumeclaim "models" not found. not found'), (),
        Reason.CLAIM_MISSING, ("claim models", "get pvc"),
    ),
    "claim not bound": (
        unscheduled("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"), (),
        Reason.CLAIM_PENDING, ("describe pvc",),
    ),
    "claim of a pod not made yet": (
        unscheduled(
            '0/1 nodes are available: waiting for ephemeral volume controller to create the persistentvolumeclaim "kv".'
        ),
        (), Reason.CLAIM_PENDING, ("describe pvc",),
    ),
    "too little disk": (
        unscheduled("0/1 nodes are available: 1 Insufficient ephemeral-storage."), (), Reason.UNSCHEDULABLE,
        ("Insufficient ephemeral-storage. Ask for less (spec.resources, spec.engine.kvOffload)",),
    ),
    "image not there": (
        waiting("ImagePullBackOff", f'Back-off pulling image "localhost:1/nope:1": ErrImagePull: {REGISTRY}'), (),
        Reason.IMAGE_PULL_FAILED, ('an image: image "localhost:1/nope:1": failed to resolve', "describe pod"),
    ),
    "image not there, told by an event": (
        waiting("ImagePullBackOff", 'Back-off pulling image "localhost:1/nope:1"'),
        (event("Failed", f'Failed to pull image "localhost:1/nope:1": {REGISTRY}'), event("Failed", "Error: x")),
        Reason.IMAGE_PULL_FAILED, ("connection refused",),
    ),
    "image never pulled": (
        waiting("ErrImageNeverPull", 'Container image "nope:1" is not present with pull policy of Never'), (),
        Reason.IMAGE_PULL_FAILED, ("not present",),
    ),
    "image name": (
        waiting("InvalidImageName", 'couldn\'t parse image name "NOPE/UPPER:1": invalid reference format'), (),
        Reason.IMAGE_PULL_FAILED, ("invalid reference format",),
    ),
    "secret of a variable": (
        waiting("CreateContainerConfigError", 'secret "hf-token" not found'), (),
        Reason.SECRET_MISSING, ("needs Secret hf-token", "get secrets"),
    ),
    "key of a secret": (
        waiting("CreateContainerConfigError", "couldn't find key HF_TOKEN in Secret ns/hf-token"), (),
        Reason.SECRET_MISSING, ("key HF_TOKEN",),
    ),
    "secret of a volume": (
        creating(), (event("FailedMount", 'MountVolume.SetUp failed for volume "k" : secret "keys" not found'),),
        Reason.SECRET_MISSING, ("Secret keys",),
    ),
    "key of a volume's secret": (
        creating(),
        (event("FailedMount", 'MountVolume.SetUp failed for volume "k" : references non-existent secret key: keys'),),
        Reason.SECRET_MISSING, ("key keys",),
    ),
    "folder of a node": (
        creating(),
        (event("FailedMount", 'MountVolume.SetUp failed for volume "k" : hostPath type check failed: /x is not a '
               "directory"),),
        Reason.VOLUME_FAILED, ("/x is not a directory", "describe pod"),
    ),
    "volume on another node": (
        creating(), (event("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used'),),
        Reason.VOLUME_FAILED, ("ReadWriteMany",),
    ),
    "root in an image": (
        waiting("CreateContainerConfigError", "container's runAsUser breaks non-root policy (pod: \"a_ns(1)\")"), (),
        Reason.POD_FORBIDDEN, ("runAsUser breaks non-root policy",),
    ),
    "a rank that died": (
        crashed(1, RANK_DIED), (), Reason.CRASH_LOOP,
        ("ended (4 times) with exit code 1: rank 1 on qwen-engine-a was killed by signal 9: the engine must be",),
    ),
    "settings refused": (
        crashed(2, "starting\npagefleet serve: error: max_model_len is 1: give at least 2\n"), (),
        Reason.SETTINGS_REFUSED,
        ("(4 times): pagefleet serve: error: max_model_len is 1", "logs qwen-engine-a -c engine --previous"),
    ),
    "settings refused that speak of the model": (
        crashed(2, "pagefleet serve: error: --load-format: the weights of /models/model are safetensors\n"), (),
        Reason.SETTINGS_REFUSED, ("refuses its settings",),
    ),
    "model refused": (
        crashed(3, "pagefleet serve: error: /models/model/config.json is missing\n"), (),
        Reason.MODEL_LOAD_FAILED, ("cannot load the model", "config.json is missing"),
    ),
    "settings of a router": (
        crashed(2, "pagefleet route: error: key file /etc/pagefleet/keys/k is empty", name="qwen-router-a"), (),
        Reason.SETTINGS_REFUSED, ("key file",),
    ),
    "memory of an engine": (
        crashed(137, "a\nKilled\n", "OOMKilled"), (), Reason.OUT_OF_MEMORY, ("Raise spec.resources.memory",),
    ),
    "memory of a router": (
        crashed(137, "", "OOMKilled", name="qwen-router-a"), (),
        Reason.OUT_OF_MEMORY, ("Raise spec.router.resources.memory",),
    ),
    "memory of a GPU": (
        crashed(1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), (),
        Reason.OUT_OF_MEMORY, ("engine.maxModelLen", "Tried to allocate"),
    ),
    "GPU off the bus": (
        crashed(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered"), (),
        Reason.GPU_FAILED, ("on node n1", "kubectl cordon n1"),
    ),
    "GPU not given": (
        pod(phase="Failed", reason="UnexpectedAdmissionError", containers=(),
            message="Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy "
            "devices nvidia.com/gpu, which is unexpected"), (),
        Reason.GPU_FAILED, ("got no GPU on node n1", "cordon n1"),
    ),
    "no such program": (
        crashed(128, 'exec: "/no/such": stat /no/such: no such file or directory', "StartError"), (),
        Reason.CRASH_LOOP, ("exit code 128, StartError: exec", "--previous"),
    ),
    "crash without words": (crashed(139), (), Reason.CRASH_LOOP, ("with exit code 139. All it said",)),
    "killed for not answering": (
        crashed(137, "listening"), KILLED_BY_PROBE,
        Reason.CRASH_LOOP, ("did not answer in time: Liveness probe failed",),
    ),
    "drained for not answering": (
        crashed(0, "stopping"), KILLED_BY_PROBE,
        Reason.CRASH_LOOP, ("did not answer in time: Liveness probe failed",),
    ),
    "killed, and slow to come back": (
        crashed(137), (event("Unhealthy", "Startup probe failed: connection refused"),),
        Reason.CRASH_LOOP, ("with exit code 137. All it said",),
    ),
    "crash while it starts again": (
        pod(containers=(container(restarts=1, last_exit_code=1, last_reason="Error", last_message="boom"),)), (),
        Reason.CRASH_LOOP, ("exit code 1: boom",),
    ),
    "disk of a node": (
        pod(phase="Failed", reason="Evicted", message='Usage of EmptyDir volume "k" exceeds the limit "5Mi". '), (),
        Reason.DISK_FULL, ("was evicted on node n1", "exceeds the limit"),
    ),
    "memory of a node": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."), (),
        Reason.OUT_OF_MEMORY, ("was evicted",),
    ),
    "node shut down": (
        pod(phase="Failed", reason="Terminated", message="Pod was terminated in response to imminent node shutdown."),
        (), Reason.NODE_LOST, ("ended with its node on node n1",),
    ),
    "kubelet had no room": (
        pod(phase="Failed", reason="OutOfcpu", message="Pod was rejected: Node didn't have enough resource"), (),
        Reason.UNSCHEDULABLE, ("had to leave",),
    ),
    "ended in a new way": (
        pod(phase="Failed", reason="Novelty", message="never seen"), (), Reason.NOT_READY, ("ended (Novelty)",),
    ),
    "node gone": (
        pod(containers=(container(),)), (event("NodeNotReady", "Node is not ready"),),
        Reason.NODE_LOST, ("node n1 of qwen-engine-a does not answer",),
    ),
    "not ready any more": (
        pod(), (event("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503"),),
        Reason.NOT_READY, ("runs but takes no requests", "logs qwen-engine-a"),
    ),
    "loading": (
        pod(), (event("Unhealthy", "Startup probe failed: connection refused"),),
        Reason.LOADING_MODEL, ("loads the model",),
    ),
    "router starting": (pod("qwen-router-a"), (), Reason.STARTING, ("runs and is not ready yet",)),
    "container being made": (creating(), (), Reason.STARTING, ("being started on node n1",)),
    "downloads by itself": (
        pod(containers=(container("download", init=True), container(state="waiting", reason="PodInitializing"))), (),
        Reason.DOWNLOADING, ("downloads the model",),
    ),
    "another init container": (
        pod(containers=(container("proxy", init=True), container(state="waiting", reason="PodInitializing"))), (),
        Reason.STARTING, (),
    ),
    "init container is done": (
        pod(containers=(container("download", init=True, state="terminated", exit_code=0), container())), (),
        Reason.LOADING_MODEL, (),
    ),
}  # fmt: skip
DOWNLOADS = {
    "ModelNotFound": Reason.MODEL_NOT_FOUND,
    "AccessDenied": Reason.ACCESS_DENIED,
    "StoreUnreachable": Reason.STORE_UNREACHABLE,
    "ChecksumMismatch": Reason.CHECKSUM_MISMATCH,
    "DiskFull": Reason.DISK_FULL,
    "BadModel": Reason.BAD_MODEL,
    "BadSettings": Reason.SETTINGS_REFUSED,
}


@pytest.mark.parametrize(("seen", "events", "reason", "words"), CASES.values(), ids=CASES.keys())
def test_a_text_becomes_a_reason_and_a_remedy(seen: Any, events: Any, reason: Reason, words: tuple[str, ...]) -> None:
    found = trouble(seen, *events)
    assert found.reason is reason, found
    assert seen.name in found.message
    for word in words:
        assert word in found.message
    assert len(found.message) < 500


@pytest.mark.parametrize(("said", "reason"), DOWNLOADS.items())
@pytest.mark.parametrize("init", [True, False])
def test_the_last_words_of_a_download_are_read(said: Any, reason: Reason, init: bool) -> None:
    name = "qwen-engine-a" if init else "qwen-model-1"
    words = "log line\n" + result(said, "repository org/x does not exist: correct spec.model.uri")
    ended = container("download", init=init, state="terminated", reason="Error", exit_code=2, message=words)
    found = trouble(pod(name, phase="Failed", containers=(ended,)))
    assert found.reason is reason
    assert "repository org/x does not exist: correct spec.model.uri" in found.message


def test_words_of_a_download_that_are_no_result_are_a_crash() -> None:
    ended = container("download", init=True, state="terminated", exit_code=1, message="Traceback ...\nKeyError: 'x'")
    found = trouble(pod(containers=(ended,)))
    assert found.reason is Reason.CRASH_LOOP
    assert "KeyError: 'x'" in found.message


def test_memory_of_a_download_is_not_the_engines_to_raise() -> None:
    ended = container("download", init=True, state="terminated", reason="OOMKilled", exit_code=137)
    assert "spec.resources.memory" not in trouble(pod(containers=(ended,))).message


def test_the_newest_event_counts() -> None:
    old = EventSeen("Pod", "qwen-engine-a", "FailedMount", "old", NOW - timedelta(minutes=9))
    new = EventSeen("Pod", "qwen-engine-a", "FailedMount", "new", NOW)
    other = EventSeen("Pod", "qwen-engine-b", "FailedMount", "other", NOW + timedelta(minutes=1))
    assert "volume: new." in trouble(creating(), new, old, other).message


def test_foreign_text_brings_no_control_characters_and_leaves_room_for_the_remedy() -> None:
    found = trouble(crashed(2, "\x1b[31m" + "x\u2028" * 4000 + "\x00"))
    assert len(found.message) < 500
    assert found.message.isprintable()
    assert found.message.endswith("--previous")


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ('pods "q-1" is forbidden: exceeded quota: few, requested: requests.memory=2Gi, used: requests.memory=0, '
         "limited: requests.memory=1Gi", Reason.QUOTA_EXCEEDED, "exceeded quota: few, requested: requests.memory=2Gi"),
        ('Error creating: pods "q-1" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
         Reason.POD_FORBIDDEN, 'violates PodSecurity "restricted:latest"'),
        ('pods "q-" is forbidden: error looking up service account ns/nope: serviceaccount "nope" not found',
         Reason.POD_FORBIDDEN, 'serviceaccount "nope" not found'),
        ('admission webhook "policy.example" denied the request: no', Reason.POD_FORBIDDEN, "policy.example"),
    ],
)  # fmt: skip
def test_pods_that_cannot_be_made(text: str, reason: Reason, words: str) -> None:
    found = refused_pods("qwen-engine", [text])
    assert found is not None
    assert found.reason is reason
    assert words in found.message
    assert "qwen-engine" in found.message


def test_nothing_is_refused_where_nothing_is_said() -> None:
    assert refused_pods("qwen-engine", []) is None


def test_broken_says_more_than_slow() -> None:
    told = [
        Trouble(one, one) for one in (Reason.STARTING, Reason.UNSCHEDULABLE, Reason.CRASH_LOOP, Reason.LOADING_MODEL)
    ]
    assert worst(told) == told[2]
    assert worst([told[0], told[3]]) == told[3]
    assert worst([]) is None
