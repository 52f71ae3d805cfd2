"""Slots over CUDA IPC, for two engines on one host: the target copies out of the source's slots, device to device.

The source exports the memory of its slots once and never its pool; the handle goes in invitations. So a target that
reads on after a transfer was withdrawn, or after its link ended, reads a slot, and the sum of what it read tells.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from pagefleet_kv.cuda_memory import HANDLE_BYTES, CudaError, CudaSharedMemory
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies, Mark
from pagefleet_kv.p2p.planes.device.link import Say
from pagefleet_kv.p2p.planes.device.turns import Turns
from pagefleet_kv.p2p.planes.device.words import Taken, Word
from pagefleet_kv.p2p.planes.shell import LinkBroken

_log = logging.getLogger(__name__)

_FACTS = struct.Struct(f"<{HANDLE_BYTES}sQI")
"""Handle, bytes of a slot, number of slots, which lie one after the other from where the handle opens."""


class IpcSource:
    """Implements `SourceCarrier`: a slot lies where the target reads it."""

    def __init__(self) -> None:
        self._announced: set[int] = set()
        self._taken: list[int] = []

    @property
    def under_way(self) -> bool:
        """Never: all that happens is told."""
        return False

    def ready(self, now: float) -> bool:
        return True

    def announced(self, number: int, slot: Tensor) -> None:
        self._announced.add(number)

    def hear(self, word: Word) -> None:
        if not isinstance(word, Taken) or word.number not in self._announced:
            raise LinkBroken("it took what was not announced")
        self._announced.remove(word.number)
        self._taken.append(word.number)

    def poll(self, now: float) -> Sequence[int]:
        taken, self._taken = self._taken, []
        return taken

    def close(self) -> None:
        """See SourceCarrier."""


class IpcTarget:
    """Implements `TargetCarrier` by copies from another process's memory.

    Raises:
        LinkBroken: the source's memory cannot be read from here, or is smaller than its slots.
    """

    by_copies = True

    def __init__(self, memory: CudaSharedMemory, copies: DeviceCopies, facts: bytes) -> None:
        try:
            handle, self._slot_bytes, self._num_slots = _FACTS.unpack(facts)
            self._opened = memory.open(handle)
        except (struct.error, CudaError) as error:
            raise LinkBroken(f"its memory cannot be read from here: {error}") from None
        self._memory = memory
        self._copies = copies
        self._copying: deque[tuple[int, Mark]] = deque()
        if self._num_slots * self._slot_bytes > self._opened.num_bytes:
            self.close()
            raise LinkBroken(
                f"it says that it has {self._num_slots} slots of {self._slot_bytes} bytes, "
                f"and its memory has {self._opened.num_bytes}"
            )

    @property
    def under_way(self) -> bool:
        """Whether copies run."""
        return bool(self._copying)

    def fetch(self, number: int, remote_slot: int, into: Tensor) -> None:
        if remote_slot >= self._num_slots or len(into) > self._slot_bytes:
            raise LinkBroken(f"frame {number} would lie in slot {remote_slot}, which is not there")
        try:
            self._memory.copy(self._opened.address + remote_slot * self._slot_bytes, into, self._copies.stream)
        except CudaError as error:
            raise LinkBroken(str(error)) from None
        self._copying.append((number, self._copies.marked()))

    def hear(self, word: Word) -> None:
        raise LinkBroken("it said what this plane does not know")

    def poll(self, now: float) -> Sequence[int]:
        come = []
        while self._copying and self._copying[0][1].done():
            come.append(self._copying.popleft()[0])
        return come

    def close(self) -> None:
        for _, mark in self._copying:
            mark.wait()
        self._copying.clear()
        try:
            self._memory.close(self._opened)
        except CudaError as error:  # the source may be gone; nothing is left to be done for it
            _log.warning("a source's memory could not be closed: %s", error)


class IpcCarriers:
    """Implements `Carriers` with memory that processes share."""

    name = "cuda_ipc"

    def __init__(self, memory: CudaSharedMemory, copies: DeviceCopies) -> None:
        self._memory = memory
        self._copies = copies
        self._exported: Tensor | None = None
        self._facts = _FACTS.pack(bytes(HANDLE_BYTES), copies.slot_bytes, 0)

    def facts(self) -> bytes:
        return self._facts

    def send_slots(self, count: int) -> Tensor:
        """See Carriers. Called once.

        Raises:
            CudaError: there is no memory for them, or none of it can be shared.
        """
        slot_bytes = self._copies.slot_bytes
        self._exported, handle = self._memory.export(count * slot_bytes)
        self._facts = _FACTS.pack(handle, slot_bytes, count)
        return self._exported.view(count, slot_bytes)

    def to_target(self, peer: str, say: Say, turns: Turns | None) -> IpcSource:
        """See Carriers. No kernel of this plane waits for another device."""
        return IpcSource()

    def to_source(self, peer: str, facts: bytes, say: Say, turns: Turns | None) -> IpcTarget:
        return IpcTarget(self._memory, self._copies, facts)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._exported is not None:
            self._memory.free(self._exported)
            self._exported = None
