"""Device planes of several engines in one process, with pools on the CPU and a control plane of one queue."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

import torch
from pagefleet_kv.p2p.data_plane import LinkUp, PlaneEvent, Tell
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.plane import DevicePlane
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.port import KVPages

from tests.fakes.byte_pages import PATIENCE_S
from tests.fakes.kv_plane import BLOCK, COMPATIBILITY, GARBAGE, NUM_BLOCKS, content
from tests.fakes.nccl_world import FakeNccl, FakeSharedMemory, NcclWorld

SLOT_BYTES = 16 * BLOCK


class TorchPool:
    """Implements `DevicePool` on the CPU."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK) -> None:
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)

    def after_steps(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams on a CPU")

    def peek(self, block: int) -> bytes:
        """What a block holds."""
        return self.blocks[block].numpy().tobytes()

    def poke(self, block: int, data: bytes) -> None:
        """Give a block's bytes."""
        self.blocks[block] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


class PoolOfHost:
    """Pages of the host, as if they were a device's."""

    def __init__(self, pages: KVPages) -> None:
        assert pages.host is not None
        self._pages = pages
        self.bytes_per_block = pages.bytes_per_block
        self.host = None
        self.wants_pinned = False
        self.blocks = torch.frombuffer(pages.host, dtype=torch.uint8).view(-1, pages.bytes_per_block)
        self.read = pages.read
        self.write = pages.write

    def after_steps(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams on a CPU")


class DeviceEnd:
    """One engine: its plane, its pool, and what the plane told."""

    def __init__(
        self,
        name: str,
        make: Callable[[DeviceCopies], Carriers],
        *,
        filled: bool = False,
        num_slots: tuple[int, int] = (4, 4),
        stall_s: float = PATIENCE_S,
    ) -> None:
        self.name = name
        self.pool = TorchPool()
        for block in range(NUM_BLOCKS):
            self.pool.poke(block, content(block) if filled else GARBAGE)
        copies = DeviceCopies(self.pool, SLOT_BYTES)
        self.plane = DevicePlane(make(copies), copies, COMPATIBILITY, num_slots, PATIENCE_S, stall_s)
        self.seen: list[PlaneEvent] = []


class Scene:
    """Engines, and the control plane between them. `lose`: says which words get lost."""

    def __init__(self, *ends: DeviceEnd) -> None:
        self.ends = {end.name: end for end in ends}
        self.lose: Callable[[Tell], bool] = lambda tell: False
        self.twice = False
        """Words come twice, as where both engines are each other's source."""
        self.words: list[tuple[str, Tell]] = []
        """All that were said, by whom."""

    def pump(self) -> None:
        """Take what was said to whom it is for."""
        for end in self.ends.values():
            for event in end.plane.events():
                if not isinstance(event, Tell):
                    end.seen.append(event)
                    continue
                self.words.append((end.name, event))
                if event.peer in self.ends and not self.lose(event):
                    for _ in range(1 + self.twice):
                        self.ends[event.peer].plane.hear(end.name, event.data)

    def until(self, condition: Callable[[], bool], what: str = "what was awaited") -> None:
        """Go on until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        self.pump()
        while not condition():
            told = {name: end.seen for name, end in self.ends.items()}
            assert time.monotonic() < deadline, f"{what} does not come: {told}"
            bells = select.poll()
            for end in self.ends.values():
                bells.register(end.plane.bell, select.POLLIN)
            bells.poll(50)
            self.pump()

    def wait_for(self, end: DeviceEnd, kind: type[PlaneEvent], count: int = 1) -> list[PlaneEvent]:
        """Return the next events of a kind, and drop those before them."""
        self.until(lambda: sum(isinstance(event, kind) for event in end.seen) >= count, f"{count} {kind.__name__}")
        found = [event for event in end.seen if isinstance(event, kind)][:count]
        end.seen = end.seen[end.seen.index(found[-1]) + 1 :]
        return found

    def join(self, source: DeviceEnd, target: DeviceEnd) -> None:
        """Connect, and wait until both know."""
        target.plane.connect(source.name, "127.0.0.1", source.plane.invite(target.name))
        self.wait_for(source, LinkUp)
        self.wait_for(target, LinkUp)

    def close(self) -> None:
        """End all planes."""
        for end in self.ends.values():
            end.plane.close()


def nccl_maker(
    world: NcclWorld,
    library: FakeNccl | None = None,
    most: Sequence[int] = (4, 4),
    stall_s: float = PATIENCE_S,
    init_s: float = PATIENCE_S,
) -> Callable[[DeviceCopies], Carriers]:
    """Carriers of one engine over a world's NCCL."""
    sending, receiving = most
    chosen = library or FakeNccl(world)
    return lambda copies: NcclCarriers(chosen, copies, sending, receiving, stall_s, init_s)


def ipc_maker(memory: FakeSharedMemory | None = None) -> Callable[[DeviceCopies], Carriers]:
    """Carriers of one engine over shared memory."""
    chosen = memory or FakeSharedMemory()
    return lambda copies: IpcCarriers(chosen, copies)
