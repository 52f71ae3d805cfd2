"""What spec.engine.kvOffload comes to: flags of the engine, its memory, and how much of a volume it fills."""

from __future__ import annotations

from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.quantities import quantity

from pagefleet_operator.plan.resolve import Resolved

CONNECTOR = "offload"
DIRECTORY_FLAG = "--kv-offload-dir"
"""Given by whoever starts an engine that has a disk: each has a folder of its own."""
_FILLED = (9, 10)
"""Of a volume. A pod whose volume is over its size is evicted, and file systems keep some of it for themselves."""
_UNITS = ("Ti", "Gi", "Mi", "Ki")


def offload_args(offload: KvOffload | None) -> tuple[str, ...]:
    """Return the flags of an engine that keeps what its pool gives up, apart from the connector's name and folder."""
    if offload is None:
        return ()
    filled, whole = _FILLED
    return (
        *("--kv-offload-memory", str(num_bytes(offload.memory))),
        *("--kv-offload-policy", offload.eviction),
        *(("--kv-offload-disk", str(num_bytes(offload.disk.size) * filled // whole)) if offload.disk else ()),
    )


def has_disk(resolved: Resolved) -> bool:
    """Return whether each engine needs a folder of its own."""
    return resolved.kv_offload is not None and resolved.kv_offload.disk is not None


def memory_request(resolved: Resolved) -> str | None:
    """Return the memory that is kept for an engine: its own, and what it may fill with K/V; None: nobody said."""
    if resolved.kv_offload is None:
        return resolved.memory
    offload = resolved.kv_offload.memory
    return offload if resolved.memory is None else _text(num_bytes(resolved.memory) + num_bytes(offload))


def num_bytes(size: str) -> int:
    """Return the bytes of a quantity, a part of one as none."""
    return int(quantity(size))


def _text(size: int) -> str:
    """Write bytes as people do, where that is exact."""
    for power, unit in zip(range(len(_UNITS), 0, -1), _UNITS, strict=True):
        if size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
