"""Anything in any order, with words lost and frames damaged: blocks hold what was sent to them, or were left alone."""

from __future__ import annotations

import ctypes
import random
import select
import time

import pytest
from pagefleet_kv.p2p.data_plane import (
    Frame,
    FrameArrived,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    Tell,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.device import plane as redial

from tests.fakes.byte_pages import PATIENCE_S
from tests.fakes.device_planes import DeviceEnd, Scene, ipc_maker, nccl_maker
from tests.fakes.kv_plane import GARBAGE, content
from tests.fakes.nccl_world import FakeSharedMemory, NcclWorld

FRAMES = 3
BLOCKS_PER_FRAME = 4
NUM_STEPS = 250
NUM_ARRIVED = 20
"""Frames that must come through all that: else nothing was tried."""


class Chaos:
    """One source and one target. Each transfer sends the source's blocks to blocks of the target's that are free."""

    def __init__(self, kind: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world, self.memory = NcclWorld(), FakeSharedMemory()
        self.world.damage = self.memory.damage = self.damage

        def end(name: str, filled: bool) -> DeviceEnd:
            maker = nccl_maker(self.world) if kind == "nccl" else ipc_maker(self.memory)
            return DeviceEnd(name, maker, filled=filled)

        self.source, self.target = end("p", True), end("d", False)
        self.scene = Scene(self.source, self.target)
        self.scene.lose = self.lose
        self.faulty = True
        self.up = self.connecting = False
        self.free = set(range(128))
        self.landings: dict[bytes, Landing] = {}
        self.leaving: dict[bytes, Landing] = {}
        self.withdrawing: set[bytes] = set()
        self.arrived: dict[int, int] = {}
        """Block of the target -> block of the source that it must hold."""
        self.num_steps = self.num_transfers = self.num_arrived = self.arrived_at = 0

    def damage(self, address: int, num_bytes: int) -> None:
        if self.faulty and self.draw.random() < 0.1:
            ctypes.c_ubyte.from_address(address + self.draw.randrange(num_bytes)).value ^= 0x40

    def lose(self, tell: Tell) -> bool:
        return self.faulty and self.draw.random() < 0.02

    def go_on(self) -> None:
        """Connect, or see how far it has come; now and then its words were lost."""
        if not self.connecting or self.draw.random() < 0.05:
            self.connecting = True
            self.connect()
        time.sleep(0.001)

    def connect(self) -> None:
        self.target.plane.connect("p", "127.0.0.1", self.source.plane.invite("d"))

    def transfer(self) -> None:
        size = FRAMES * BLOCKS_PER_FRAME
        if not self.up or len(self.free) < size or len(self.landings) >= 4:
            return
        self.num_transfers += 1
        transfer_id = self.num_transfers.to_bytes(16, "big")
        into = self.draw.sample(sorted(self.free), size)
        self.free -= set(into)
        self.landings[transfer_id] = landing = Landing(transfer_id, 1, 0, into)
        self.target.plane.land("p", landing)
        for seq in range(FRAMES):
            first = seq * BLOCKS_PER_FRAME
            blocks = [self.sent(transfer_id, first + at) for at in range(BLOCKS_PER_FRAME)]
            epoch = 1 if self.draw.random() < 0.9 else 2
            self.source.plane.send("d", Frame(transfer_id, epoch, seq, first, blocks))

    @staticmethod
    def sent(transfer_id: bytes, index: int) -> int:
        """Which block of the source's a transfer sends at an index."""
        return (int.from_bytes(transfer_id, "big") * 31 + index * 7) % 256

    def forget(self) -> None:
        if self.landings:
            transfer_id = self.draw.choice(sorted(self.landings))
            self.leaving[transfer_id] = self.landings.pop(transfer_id)
            self.target.plane.forget(transfer_id)

    def withdraw(self) -> None:
        if self.landings:
            transfer_id = self.draw.choice(sorted(self.landings))
            self.withdrawing.add(transfer_id)
            self.source.plane.withdraw(transfer_id)

    def disconnect(self) -> None:
        if self.draw.random() < 0.5:
            self.target.plane.disconnect("p", "target")
        else:
            self.source.plane.disconnect("d", "source")
        self.up = False

    def step(self) -> None:
        """Do something, and take what happened."""
        self.num_steps += 1
        acts = [self.transfer] * 8 + [self.forget] * 4 + [self.withdraw] * 2 + [self.disconnect] + [self.connect]
        self.draw.choice(acts)()
        if self.draw.random() < 0.5:
            self.give_way()
        self.take()

    def give_way(self) -> None:
        """Let frames come on their way: ever longer while none comes, as where planes' threads seldom get a turn."""
        bells = [self.source.plane.bell, self.target.plane.bell]
        select.select(bells, [], [], 0.005)
        self.scene.pump()
        deadline = time.monotonic() + min(1.0, 0.001 * (self.num_steps - self.arrived_at))
        while not self.target.seen and (left := deadline - time.monotonic()) > 0:
            select.select(bells, [], [], left)
            self.scene.pump()

    def take(self) -> None:
        """Look at what both ends told."""
        self.scene.pump()
        for event in self.target.seen:
            match event:
                case FrameArrived():
                    landing = self.landings.get(event.transfer_id) or self.leaving[event.transfer_id]
                    for at in range(event.first_block, event.first_block + event.num_blocks):
                        self.arrived[landing.blocks[at]] = self.sent(event.transfer_id, at)
                    self.num_arrived += 1
                    self.arrived_at = self.num_steps
                case Landed(transfer_id):
                    self.let_go(self.leaving.pop(transfer_id))
                case LinkUp() | LinkDown():
                    self.up, self.connecting = isinstance(event, LinkUp), False
        self.withdrawing -= {event.transfer_id for event in self.source.seen if isinstance(event, Withdrawn)}
        self.target.seen.clear()
        self.source.seen.clear()

    def let_go(self, landing: Landing) -> None:
        """The blocks are somebody else's: what arrived is right, and nothing else comes."""
        for block in landing.blocks:
            held = self.arrived.pop(block, None)
            assert held is None or self.target.pool.peek(block) == content(held)
            self.target.pool.poke(block, GARBAGE)
            self.free.add(block)

    def all_are_gone(self) -> bool:
        """Whether both ends let go of all."""
        self.take()
        return not self.leaving and not self.withdrawing

    def end(self) -> None:
        """Let all go, and look at every block; then one more transfer, on a line without faults."""
        while self.landings:
            self.forget()
        self.scene.until(self.all_are_gone, "the end of all")
        self.faulty = False
        self.source.plane.disconnect("d", "source")
        self.target.plane.disconnect("p", "target")
        assert all(self.target.pool.peek(block) == GARBAGE for block in range(256))
        self.take()
        self.up = False

        def joined() -> bool:
            self.connect()
            self.scene.until(lambda: any(isinstance(event, LinkUp | LinkDown) for event in self.target.seen))
            self.take()
            return self.up

        self.scene.until(joined, "a link")
        last = b"the last of them"
        self.target.plane.land("p", Landing(last, 1, 0, [200]))
        self.source.plane.send("d", Frame(last, 1, 0, 0, [9]))
        self.scene.wait_for(self.target, FrameArrived)
        assert self.target.pool.peek(200) == content(9)


@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_hold_what_was_sent_to_them_or_were_left_alone(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redial, "FIRST_S", 0.001)  # or the two would be apart nearly all the time
    monkeypatch.setattr(redial, "MOST_S", 0.001)
    chaos = Chaos(kind, seed)
    deadline = time.monotonic() + PATIENCE_S
    while chaos.num_steps < NUM_STEPS or chaos.num_arrived < NUM_ARRIVED:
        assert time.monotonic() < deadline, f"{chaos.num_arrived} frames came of {chaos.num_transfers} transfers"
        if not chaos.up:
            chaos.go_on()
        chaos.step()
    chaos.end()
    chaos.scene.close()
    assert not chaos.world.ranks
    assert chaos.memory.opened == 0
