"""The volume of an engine's pod for K/V that its host memory gives up. It lives as long as the pod.

A container that starts again finds it; a pod that takes another's place begins with an empty one. Without a storage
class it is a part of the node's own disk, with which nodes are chosen; with one, a claim that goes with its pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagefleet_protocol.kv_offload import KvOffloadDisk

from pagefleet_operator.plan.kv_offload import DIRECTORY_FLAG
from pagefleet_operator.plan.objects.names_and_labels import Object
from pagefleet_operator.plan.resolved import Resolved

DISK_PATH = "/var/cache/pagefleet/kv"
_VOLUME = "kv"


def disk_args(resolved: Resolved) -> tuple[str, ...]:
    """Return the flag that names the folder."""
    return (DIRECTORY_FLAG, DISK_PATH) if _disk(resolved) else ()


def disk_mounts(resolved: Resolved) -> list[Object]:
    """Return where the container has it."""
    return [{"name": _VOLUME, "mountPath": DISK_PATH}] if _disk(resolved) else []


def disk_volumes(resolved: Resolved, labels: Mapping[str, str]) -> list[Object]:
    """Return the volume; `labels` are those of a claim that is made for it."""
    disk = _disk(resolved)
    if disk is None:
        return []
    if disk.storage_class is None:
        return [{"name": _VOLUME, "emptyDir": {"sizeLimit": disk.size}}]
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": disk.storage_class,
        "resources": {"requests": {"storage": disk.size}},
    }
    template = {"metadata": {"labels": dict(labels)}, "spec": claim}
    return [{"name": _VOLUME, "ephemeral": {"volumeClaimTemplate": template}}]


def disk_request(resolved: Resolved) -> Object:
    """Return what a node has to have free. No limit: /tmp and the logs would count against it, too."""
    disk = _disk(resolved)
    return {"ephemeral-storage": disk.size} if disk and disk.storage_class is None else {}


def _disk(resolved: Resolved) -> KvOffloadDisk | None:
    return resolved.kv_offload.disk if resolved.kv_offload else None
