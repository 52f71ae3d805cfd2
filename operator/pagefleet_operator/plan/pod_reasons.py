"""Why a pod does not serve: what Kubernetes says of it, as one reason and one sentence that says what to do.

The texts that are recognized are those of kubelet, scheduler and controllers of Kubernetes 1.27 to 1.36; one that is
not is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagefleet_operator.plan.exit_reasons import exit_trouble
from pagefleet_operator.plan.observed import DOWNLOAD, ContainerSeen, EventSeen, PodSeen
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Trouble, quoted

_PRECEDENCE = (
    Reason.SETTINGS_REFUSED,
    Reason.BAD_MODEL,
    Reason.MODEL_LOAD_FAILED,
    Reason.MODEL_NOT_FOUND,
    Reason.ACCESS_DENIED,
    Reason.OUT_OF_MEMORY,
    Reason.GPU_FAILED,
    Reason.CHECKSUM_MISMATCH,
    Reason.DISK_FULL,
    Reason.STORE_UNREACHABLE,
    Reason.CRASH_LOOP,
    Reason.SECRET_MISSING,
    Reason.IMAGE_PULL_FAILED,
    Reason.VOLUME_FAILED,
    Reason.POD_FORBIDDEN,
    Reason.QUOTA_EXCEEDED,
    Reason.CLAIM_MISSING,
    Reason.CLAIM_PENDING,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.NODE_LOST,
    Reason.NOT_READY,
    Reason.LOADING_MODEL,
    Reason.DOWNLOADING,
    Reason.STARTING,
)
"""Of several pods with different troubles, the first here is told: what is broken says more than what is slow."""

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "PreCreateHookError"})
_SECRET = re.compile(
    r'secret "([^"]+)" not found|find key (\S+) in Secret \S*?([^/\s]+)$|non-existent secret key: (\S+)'
)
_EXTENDED_RESOURCE = re.compile(r"Insufficient ([\w.-]+/[\w.-]+?)[.,]?(?:\s|$)")
_KILLED = re.compile(r"Container (\S+) failed (\w+) probe, will be restarted")
_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" (not found|is being deleted)')
_CLAIM_TROUBLE = (
    "unbound immediate PersistentVolumeClaims",
    "bound to non-existent persistentvolume",
    "waiting for ephemeral volume controller",
)


@dataclass(frozen=True, slots=True)
class EventLog:
    """Events about the pods of one InferenceService, found by what they are about."""

    events: tuple[EventSeen, ...]

    def about(self, kind: str, name: str, *reasons: str) -> tuple[EventSeen, ...]:
        """Return those of an object that have one of the reasons, the newest first."""
        found = [one for one in self.events if (one.kind, one.name) == (kind, name) and one.reason in reasons]
        return tuple(sorted(found, key=lambda one: one.last_seen, reverse=True))

    def last(self, kind: str, name: str, *reasons: str) -> str:
        """Return the newest one's message; empty where there is none."""
        return next((one.message for one in self.about(kind, name, *reasons)), "")


def worst(troubles: Iterable[Trouble]) -> Trouble | None:
    """Return the one to tell of; of equals the first."""
    rank = {reason: place for place, reason in enumerate(_PRECEDENCE)}
    return min(troubles, key=lambda one: rank.get(one.reason, len(rank)), default=None)


def pod_trouble(pod: PodSeen, log: EventLog, namespace: str) -> Trouble:
    """Say why `pod`, which does not serve, does not."""
    return (
        _ended(pod)
        or _unscheduled(pod, namespace)
        or _broken_container(pod, log, namespace)
        or _volumes(pod, log, namespace)
        or _node(pod, log)
        or _slow(pod, log, namespace)
    )


def refused_pods(name: str, messages: Sequence[str]) -> Trouble | None:
    """Say why no pods of `name` can be made.

    Args:
        name: Deployment or Job.
        messages: of its ReplicaFailure condition, or of FailedCreate events; the first is told.
    """
    if not messages:
        return None
    text = re.sub(r'^(Error creating: )?pods "[^"]*" is forbidden: ', "", messages[0])
    if "exceeded quota" in text:
        remedy = "Ask for less (spec.resources, spec.replicas), or have the namespace's ResourceQuota raised"
        return Trouble(
            Reason.QUOTA_EXCEEDED, f"the namespace's quota leaves no room for pods of {name}: {quoted(text)}. {remedy}"
        )
    remedy = "Change what podTemplate adds, or the namespace's policy"
    return Trouble(Reason.POD_FORBIDDEN, f"Kubernetes refuses the pods of {name}: {quoted(text)}. {remedy}")


def _ended(pod: PodSeen) -> Trouble | None:
    """Read the pod's own reason: kubelet refused it, or ended it."""
    if not pod.reason:
        return None
    on = f" on node {pod.node}" if pod.node else ""
    said = quoted(pod.message) or pod.reason
    replaced = "Another pod takes its place"
    match pod.reason:
        case "UnexpectedAdmissionError" | "OutOfnvidia.com/gpu":
            remedy = f"Look at the node's device plugin, or keep pods away: kubectl cordon {pod.node or 'NODE'}"
            reason, what = Reason.GPU_FAILED, "got no GPU"
        case "Evicted" if "memory" in pod.message.lower():
            remedy = "Set spec.resources.memory to what engines use, so that nodes keep it for them"
            reason, what = Reason.OUT_OF_MEMORY, "was evicted"
        case "Evicted":
            remedy = (
                "Free disk space on the node, or take less of it (spec.cache.type pvc for the model, "
                "spec.engine.kvOffload.disk)"
            )
            reason, what = Reason.DISK_FULL, "was evicted"
        case "NodeLost" | "NodeShutdown" | "Terminated" | "Shutdown" | "NodeAffinity" | "DeletionByTaintManager":
            reason, what, remedy = Reason.NODE_LOST, "ended with its node", replaced
        case _ if pod.reason.startswith("OutOf") or pod.reason == "Preempting":
            reason, what, remedy = Reason.UNSCHEDULABLE, "had to leave", replaced
        case _:
            reason, what, remedy = Reason.NOT_READY, f"ended ({pod.reason})", replaced
    return Trouble(reason, f"{pod.name} {what}{on}: {said}. {remedy}")


def _unscheduled(pod: PodSeen, namespace: str) -> Trouble | None:
    if not pod.unschedulable:
        return None
    text = re.split(r" (?:no new claims to deallocate|preemption:)", pod.unschedulable)[0]
    claim = _CLAIM.search(text)
    if claim:
        remedy = f"Make it, or correct the name: kubectl -n {namespace} get pvc"
        return Trouble(Reason.CLAIM_MISSING, f"{pod.name} waits for claim {claim[1]}, which is not there. {remedy}")
    if any(words in text for words in _CLAIM_TROUBLE):
        remedy = f"A storage class that can make it is missing, perhaps: kubectl -n {namespace} describe pvc"
        return Trouble(Reason.CLAIM_PENDING, f"{pod.name} waits for a claim that no volume is bound to. {remedy}")
    resource = _EXTENDED_RESOURCE.search(text)
    if resource:
        column = resource[1].replace(".", "\\.")
        remedy = (
            "Free some, add a node, or lower spec.replicas or spec.resources.gpus (an engine's are on one node); "
            f"kubectl get nodes -o custom-columns='NODE:.metadata.name,HAS:.status.allocatable.{column}' shows them"
        )
        return Trouble(
            Reason.INSUFFICIENT_GPU, f"no node has enough free {resource[1]} for {pod.name}: {quoted(text)}. {remedy}"
        )
    remedy = (
        "Ask for less (spec.resources, spec.engine.kvOffload), correct the profile's nodeSelector and tolerations, or "
        "add a node"
    )
    return Trouble(Reason.UNSCHEDULABLE, f"no node takes {pod.name}: {quoted(text)}. {remedy}")


def _broken_container(pod: PodSeen, log: EventLog, namespace: str) -> Trouble | None:
    for container in sorted(pod.containers, key=lambda one: not one.init):
        if container.state == "waiting" and container.reason in _IMAGE_REASONS:
            return _image(pod, container, log, namespace)
        if container.state == "waiting" and container.reason in _CONFIG_REASONS:
            return _configuration(pod, container, namespace)
        trouble = exit_trouble(pod, container, _killed_for(pod, container, log), namespace)
        if trouble:
            return trouble
    return None


def _image(pod: PodSeen, container: ContainerSeen, log: EventLog, namespace: str) -> Trouble:
    said = container.message
    if not said or "ErrImagePull: " not in said:
        # Some kubelets keep the cause for the event.
        pulls = [one.message for one in log.about("Pod", pod.name, "Failed") if "pull image" in one.message]
        said = pulls[0] if pulls and container.reason == "ImagePullBackOff" else said
    said = re.sub(r'^Back-off pulling image "[^"]*": ErrImagePull: ', "", said)
    said = re.sub(r'^(Failed to pull image "[^"]*": )?failed to pull and unpack (image "[^"]*")', r"\2", said)
    remedy = (
        f"Check the image's name and podTemplate's imagePullSecrets: kubectl -n {namespace} describe pod {pod.name}"
    )
    return Trouble(
        Reason.IMAGE_PULL_FAILED, f"{pod.name} cannot pull an image: {quoted(said) or container.reason}. {remedy}"
    )


def _configuration(pod: PodSeen, container: ContainerSeen, namespace: str) -> Trouble:
    secret = _missing_secret(pod, container.message, namespace)
    if secret:
        return secret
    remedy = f"kubectl -n {namespace} describe pod {pod.name}"
    return Trouble(
        Reason.POD_FORBIDDEN,
        f"container {container.name} of {pod.name} cannot be made: {quoted(container.message) or container.reason}. "
        f"Change what podTemplate adds, or the image; more: {remedy}",
    )


def _missing_secret(pod: PodSeen, text: str, namespace: str) -> Trouble | None:
    found = _SECRET.search(text)
    if not found:
        return None
    what = f"Secret {found[1]}" if found[1] else f"key {found[2] or found[4]} of its Secret"
    remedy = f"Make it, or correct the name in the spec: kubectl -n {namespace} get secrets"
    return Trouble(Reason.SECRET_MISSING, f"{pod.name} needs {what}, which is not there. {remedy}")


def _volumes(pod: PodSeen, log: EventLog, namespace: str) -> Trouble | None:
    """Read the events of a pod whose containers wait for its volumes."""
    if any(one.state != "waiting" for one in pod.containers) or not pod.node or pod.ready:
        return None
    text = log.last("Pod", pod.name, "FailedMount", "FailedAttachVolume", "FailedMapVolume")
    if not text:
        return None
    secret = _missing_secret(pod, text, namespace)
    if secret:
        return secret
    remedy = f"See kubectl -n {namespace} describe pod {pod.name}"
    if "Multi-Attach" in text:
        remedy = "The volume is on another node: use one with ReadWriteMany"
    return Trouble(Reason.VOLUME_FAILED, f"{pod.name} waits for a volume: {quoted(text)}. {remedy}")


def _node(pod: PodSeen, log: EventLog) -> Trouble | None:
    text = log.last("Pod", pod.name, "NodeNotReady", "NodeLost")
    if not text:
        return None
    remedy = "Another pod takes its place after some minutes, at once if you delete the node"
    return Trouble(
        Reason.NODE_LOST, f"node {pod.node or 'unknown'} of {pod.name} does not answer: {quoted(text)}. {remedy}"
    )


def _slow(pod: PodSeen, log: EventLog, namespace: str) -> Trouble:
    """Say how far a pod is that nothing stands in the way of."""
    # Before the engine only this container downloads; other init containers are podTemplate's.
    if any(one.name == DOWNLOAD and one.state == "running" for one in pod.containers):
        return Trouble(Reason.DOWNLOADING, f"{pod.name} downloads the model")
    if not any(one.state == "running" for one in pod.containers if not one.init):
        return Trouble(Reason.STARTING, f"{pod.name} is being started{f' on node {pod.node}' if pod.node else ''}")
    failed = _probe_failure(pod, log)
    if failed.startswith("Readiness"):
        remedy = f"kubectl -n {namespace} logs {pod.name}"
        return Trouble(Reason.NOT_READY, f"{pod.name} runs but takes no requests: {quoted(failed)}. See {remedy}")
    if pod.component == "engine":
        return Trouble(Reason.LOADING_MODEL, f"{pod.name} loads the model")
    return Trouble(Reason.STARTING, f"{pod.name} runs and is not ready yet")


def _killed_for(pod: PodSeen, container: ContainerSeen, log: EventLog) -> str:
    """Return what the probe said for which the kubelet ended a container; empty: it ended for another reason."""
    ended = (_KILLED.fullmatch(one.message) for one in log.about("Pod", pod.name, "Killing"))
    probe = next((found[2] for found in ended if found and found[1] == container.name), None)
    said = (one.message for one in log.about("Pod", pod.name, "Unhealthy"))
    # The container that took its place fails its first probes, too.
    return next((one for one in said if probe and one.lower().startswith(probe)), "")


def _probe_failure(pod: PodSeen, log: EventLog) -> str:
    return log.last("Pod", pod.name, "Unhealthy")
