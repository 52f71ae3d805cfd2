"""What engines keep of the K/V that their pool gives up: a part of the InferenceService, and of profiles."""

from __future__ import annotations

from typing import Literal

from pagefleet_protocol.quantities import Quantity
from pagefleet_protocol.resource_base import Object, ObjectName


class KvOffloadDisk(Object):
    """Room on disk of each engine's own."""

    size: Quantity
    """Of the volume, e.g. 100Gi; engines fill nine tenths of it, the rest is for the file system."""
    storage_class: ObjectName | None = None
    """Of the volume that each pod then gets; default: the node's own disk. `pagefleet up` has no classes."""


class KvOffload(Object):
    """Host memory, then disk, for the K/V that the pool gives up: it is brought back when a prompt comes again."""

    memory: Quantity
    """Host memory of each engine, e.g. 32Gi; it is added to resources.memory."""
    disk: KvOffloadDisk | None = None
    """Where what the memory gives up goes; default: nowhere. It lasts as long as the pod, whatever restarts in it."""
    eviction: Literal["lru", "arc"] = "lru"
    """Which blocks go first; lru: those not used for longest; arc also counts how often they were used, so that prompts
    that come once do not push out what many share."""

    def __str__(self) -> str:
        disk = f", {self.disk.size} of disk" if self.disk else ""
        return f"{self.memory} of memory{disk}, {self.eviction}"
