"""What a source says of its slots, against the memory that its handle opens."""

from __future__ import annotations

import struct

import pytest
import torch
from pagefleet_kv.p2p.data_plane import FrameArrived, LinkDown
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers, IpcTarget
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.shell import LinkBroken

from tests.fakes.device_planes import SLOT_BYTES, DeviceEnd, Scene, TorchPool, ipc_maker
from tests.fakes.kv_plane import content, frame, landing
from tests.fakes.nccl_world import FakeSharedMemory

FACTS = struct.Struct("<64sQI")
NUM_SLOTS = 4


@pytest.mark.parametrize(
    ("slot_bytes", "num_slots"),
    [
        (SLOT_BYTES, NUM_SLOTS + 1),
        (SLOT_BYTES + 1, NUM_SLOTS),
        (SLOT_BYTES * NUM_SLOTS + 1, 1),
        ((1 << 64) - 1, (1 << 32) - 1),
    ],
    ids=["one more", "longer", "one that is long", "more than any device has"],
)
def test_a_source_that_says_it_has_more_than_was_opened_is_left(slot_bytes: int, num_slots: int) -> None:
    memory = FakeSharedMemory()
    source, target = DeviceEnd("p", ipc_maker(memory), filled=True), DeviceEnd("d", ipc_maker(memory))
    scene = Scene(source, target)
    invitation = source.plane.invite("d")
    handle = FACTS.unpack(invitation[-FACTS.size :])[0]
    target.plane.connect("liar", "127.0.0.1", invitation[: -FACTS.size] + FACTS.pack(handle, slot_bytes, num_slots))
    (down,) = scene.wait_for(target, LinkDown)
    assert isinstance(down, LinkDown)
    said = f"it says that it has {num_slots} slots of {slot_bytes} bytes, and its memory has {NUM_SLOTS * SLOT_BYTES}"
    assert said in down.reason
    assert memory.opened == 0

    scene.join(source, target)
    target.plane.land("p", landing([5]))
    source.plane.send("d", frame(0, 0, [7]))
    scene.wait_for(target, FrameArrived)
    assert target.pool.peek(5) == content(7)
    scene.close()


def test_all_of_what_was_opened_may_be_slots() -> None:
    memory, copies = FakeSharedMemory(), DeviceCopies(TorchPool(), SLOT_BYTES)
    slots, handle = memory.export(NUM_SLOTS * SLOT_BYTES)
    slots[-SLOT_BYTES:] = 42
    target = IpcTarget(memory, copies, FACTS.pack(handle, SLOT_BYTES, NUM_SLOTS))
    into = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    target.fetch(0, NUM_SLOTS - 1, into)
    assert target.poll(0.0) == [0]
    assert into.eq(42).all()
    target.close()
    assert memory.opened == 0


def test_an_engine_that_sends_nothing_has_no_slot_to_read() -> None:
    memory, copies = FakeSharedMemory(), DeviceCopies(TorchPool(), SLOT_BYTES)
    target = IpcTarget(memory, copies, IpcCarriers(memory, copies).facts())
    with pytest.raises(LinkBroken, match="slot 0, which is not there"):
        target.fetch(0, 0, torch.zeros(8, dtype=torch.uint8))
    target.close()
    assert memory.opened == 0
