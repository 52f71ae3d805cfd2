"""What a model job found out, out of its pod's last words. It is kept on the Job: pods go, the Job stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagefleet_protocol.model_facts import DownloadResult, DownloadResultError, decode_result, encode_result

from pagefleet_operator.plan.observed import Child, ChildKey, PodSeen
from pagefleet_operator.plan.service_plan import ANNOTATION_FACTS


def to_keep(children: Mapping[ChildKey, Child], pods: Sequence[PodSeen]) -> Mapping[str, str]:
    """Return what is to be written on Jobs that do not hold it yet, by Job."""
    found = {}
    for (kind, name), child in children.items():
        if kind == "Job" and child.ours and ANNOTATION_FACTS not in (child.body["metadata"].get("annotations") or {}):
            result = _said_by(pods, name)
            if result is not None:
                found[name] = encode_result(result).decode().strip()
    return found


def _said_by(pods: Sequence[PodSeen], job: str) -> DownloadResult | None:
    """Return what a pod of a Job said when it succeeded; None: no pod of it is there, or none succeeded."""
    for pod in pods:
        if pod.component != "model" or not pod.name.startswith(f"{job}-"):
            continue
        for container in pod.containers:
            if container.state == "terminated" and container.exit_code == 0:
                result = _parsed(container.message)
                if result is not None and result.facts is not None:
                    return result
    return None


def _parsed(text: str) -> DownloadResult | None:
    try:
        return decode_result(text) if text else None
    except DownloadResultError:
        return None
