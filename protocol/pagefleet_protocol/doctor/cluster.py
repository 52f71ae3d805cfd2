"""What is wrong with a cluster, by `kubectl`, with the rights of whoever asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagefleet_protocol.doctor.checks import Finding, note, well, wrong
from pagefleet_protocol.doctor.machine import ProgramFailed, Run
from pagefleet_protocol.kube_names import GROUP, LABEL_SERVICE, PLURAL, PROFILE_PLURAL

_OLDEST = (1, 30)
_OPERATOR = "app.kubernetes.io/name=pagefleet-operator"
_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_INSTALL = "helm install pagefleet charts/pagefleet; docs/kubernetes.md has the whole way"
_LOOK_S = "15s"

Body = Mapping[str, Any]


class Kubectl:
    """Asks the cluster of the current context."""

    def __init__(self, run: Run, namespace: str | None = None) -> None:
        self._run = run
        self._where = ["--namespace", namespace] if namespace else []

    def json(self, *words: str) -> Body:
        """Return what is asked for.

        Raises:
            ProgramFailed: there is no answer, or no right.
        """
        text = self._run(["kubectl", "--request-timeout", _LOOK_S, *self._where, *words, "-o", "json"])
        try:
            found: Body = json.loads(text)
        except ValueError as error:
            raise ProgramFailed("kubectl answers with what is no JSON") from error
        return found

    def items(self, *words: str) -> Sequence[Body]:
        """Return the objects of a list."""
        return list(self.json("get", *words).get("items") or ())

    def may(self, verb: str, resource: str) -> bool:
        """Whether whoever asks may do that."""
        try:
            command = ["kubectl", "--request-timeout", _LOOK_S, *self._where, "auth", "can-i", verb, resource]
            return self._run(command).strip().startswith("yes")
        except ProgramFailed:
            return False  # "no" has the status of a failure


def check_cluster(kubectl: Kubectl) -> Iterator[Finding]:
    """Yield what was found; only the first thing where nothing answers."""
    try:
        version = kubectl.json("version").get("serverVersion") or {}
    except ProgramFailed as failed:
        yield wrong("API server", str(failed), "install kubectl, and choose the cluster: kubectl config get-contexts")
        return
    yield _version(version)
    for look in (_definitions, _operator, _rights, _nodes, _pods, _services):
        try:
            yield from look(kubectl)
        except ProgramFailed as failed:
            yield note(look.__name__.strip("_"), f"cannot be looked at: {failed}", "ask who may read it")


def _version(server: Body) -> Finding:
    numbers = tuple(int("".join(filter(str.isdecimal, str(server.get(part, "")))) or 0) for part in ("major", "minor"))
    text = f"Kubernetes {server.get('gitVersion', 'of an unknown version')}"
    if numbers < _OLDEST:
        return wrong("API server", text, "update it to 1.30 or newer")
    return well("API server", text)


def _definitions(kubectl: Kubectl) -> Iterator[Finding]:
    there = {one["metadata"]["name"]: one for one in kubectl.items("customresourcedefinitions")}
    for plural in (PLURAL, PROFILE_PLURAL):
        name = f"{plural}.{GROUP}"
        conditions = (there.get(name, {}).get("status") or {}).get("conditions") or ()
        established = any(one.get("type") == "Established" and one.get("status") == "True" for one in conditions)
        if name not in there:
            yield wrong("definitions", f"{name} is not there", _INSTALL)
        elif not established:
            yield wrong("definitions", f"{name} is not established", f"kubectl describe crd {name} says why")
        else:
            yield well("definitions", name)


def _operator(kubectl: Kubectl) -> Iterator[Finding]:
    found = kubectl.items("deployments", "--all-namespaces", "--selector", _OPERATOR)
    if not found:
        yield wrong("operator", "none is installed", _INSTALL)
    for one in found:
        name = f"{one['metadata']['namespace']}/{one['metadata']['name']}"
        ready, wanted = (one.get("status") or {}).get("readyReplicas") or 0, one["spec"].get("replicas", 1)
        if not ready:
            do = f"kubectl -n {one['metadata']['namespace']} describe pods -l {_OPERATOR}"
            yield wrong("operator", f"{name}: none of {wanted} is ready", do)
        elif ready < wanted:
            yield note("operator", f"{name}: {ready} of {wanted} ready")
        else:
            yield well("operator", f"{name}: {ready} ready")


def _rights(kubectl: Kubectl) -> Iterator[Finding]:
    resource = f"{PLURAL}.{GROUP}"
    lacking = [verb for verb in ("get", "create", "patch", "delete") if not kubectl.may(verb, resource)]
    if lacking:
        do = "ask for the role `edit` here, with the chart's userRoles on; or choose another --namespace"
        yield note("rights", f"you may not {', '.join(lacking)} InferenceServices here", do)
    else:
        yield well("rights", "you may write InferenceServices here")


def _nodes(kubectl: Kubectl) -> Iterator[Finding]:
    nodes = kubectl.items("nodes")
    away = [one["metadata"]["name"] for one in nodes if not _is_ready(one)]
    if away:
        yield wrong("nodes", f"not ready: {', '.join(away)}", f"kubectl describe node {away[0]}")
    gpus = {one["metadata"]["name"]: _gpus(one) for one in nodes}
    if any(gpus.values()):
        counts = ", ".join(f"{name} {count}" for name, count in gpus.items() if count)
        yield well("nodes", f"GPUs: {counts}; an engine may have up to {max(gpus.values())} (resources.gpus)")
    else:
        do = "for engines with GPUs install NVIDIA's device plugin, or the GPU operator"
        yield note("nodes", f"none of {len(nodes)} has nvidia.com/gpu", do)


def _gpus(node: Body) -> int:
    return int(((node.get("status") or {}).get("allocatable") or {}).get("nvidia.com/gpu") or 0)


def _is_ready(one: Body) -> bool:
    conditions = (one.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _pods(kubectl: Kubectl) -> Iterator[Finding]:
    """Yield the images that nodes do not get."""
    pods = [*kubectl.items("pods", "--selector", LABEL_SERVICE), *kubectl.items("pods", "--selector", _OPERATOR)]
    failed = {
        status["image"]: f"{pod['metadata']['name']}: {status['image']}: {status['state']['waiting']['reason']}"
        for pod in pods
        for status in ((pod.get("status") or {}).get("containerStatuses") or ())
        if ((status.get("state") or {}).get("waiting") or {}).get("reason") in _NOT_PULLED
    }
    for text in failed.values():
        yield wrong(
            "images", text, "correct the name, or give the nodes a Secret for the registry (images.pullSecrets)"
        )
    if pods and not failed:
        yield well("images", f"of {len(pods)} pods")


def _services(kubectl: Kubectl) -> Iterator[Finding]:
    for one in kubectl.items(f"{PLURAL}.{GROUP}"):
        name = one["metadata"]["name"]
        conditions = (one.get("status") or {}).get("conditions") or ()
        ready: Body = next((each for each in conditions if each.get("type") == "Ready"), {})
        reason = ready.get("reason", "no operator has looked at it")
        if ready.get("status") == "True":
            yield well("services", f"{name}: {reason}")
        else:
            do = f"docs/troubleshooting.md#{str(reason).lower()}; kubectl describe pfis {name}" if ready else _INSTALL
            yield wrong("services", f"{name}: {reason}: {ready.get('message', '')}".rstrip(": "), do)
