"""What the thread that schedules asks of the mover, and is told. Jobs of one lane run in order, lanes side by side.

load lane    LoadJob ProbeJob        what requests wait for
copy lane    CopyOutJob              pages to host memory: holds blocks of the pool, so nothing slow goes before it
disk lane    SpillJob StoreJob DropJob ClearJob, and the scan of the folder before them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_kv.block_key import BlockKey


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill blocks of the pool, in this order; it ends at the first that cannot be filled."""

    job_id: int
    blocks: Sequence[int]
    sources: Sequence[int | BlockKey]
    """For each block: a slot of host memory, or the key of a block on disk."""


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Count the leading blocks that the folder has."""

    job_id: int
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class CopyOutJob:
    """Copy blocks of the pool to slots of host memory."""

    job_id: int
    blocks: Sequence[int]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class SpillJob:
    """Write a slot of host memory to the folder."""

    job_id: int
    slot: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write blocks of the pool to the folder, but for those that it has."""

    job_id: int
    blocks: Sequence[int]
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class DropJob:
    """Delete blocks from the folder."""

    job_id: int
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class ClearJob:
    """Delete all that the folder holds, once the loads asked for before have ended."""

    job_id: int


Job = LoadJob | ProbeJob | CopyOutJob | SpillJob | StoreJob | DropJob | ClearJob


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A job that ended; nothing of it touches the pages any more."""

    job_id: int
    num_blocks: int
    """Leading blocks that were moved and checked."""
    error: str | None = None
