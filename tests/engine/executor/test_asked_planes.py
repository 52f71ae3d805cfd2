"""Planes on devices that only their ranks reach: what the core asks of them, and when they may touch blocks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from pagefleet_engine.executor.asked_planes import AskedPlane
from pagefleet_engine.executor.rank_pages import StepFence
from pagefleet_kv.cuda_memory import CudaError
from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.p2p.data_plane import (
    Frame,
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    PlaneEvent,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.lanes import WHOLE
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening
from pagefleet_kv.p2p.planes.device.ranked import RankedPlane
from pagefleet_kv.p2p.planes.local_device import AtOnce, LocalDevice
from pagefleet_kv.port import KVShard

from tests.fakes.byte_pages import PATIENCE_S
from tests.fakes.device_planes import Scene, TorchPool
from tests.fakes.many_descriptors import many_descriptors
from tests.fakes.nccl_world import FakeSharedMemory
from tests.fakes.plane_rank import PlaneRank

LAYERS, HEADS, HEAD_BYTES, NUM_BLOCKS = 3, 2, 8, 12
WHOLE_BYTES = LAYERS * 2 * HEADS * HEAD_BYTES
ALONE = [KVShard(range(LAYERS), range(HEADS))]
BY_HEAD = [KVShard(range(LAYERS), range(head, head + 1)) for head in range(HEADS)]
BY_LAYER = [KVShard(range(1), range(HEADS)), KVShard(range(1, LAYERS), range(HEADS))]
OPENING = PlaneOpening("cuda_ipc", b"c" * 32, 4, (4, 4), (4, 4))
TRANSFER = b"t" * 16

Region = tuple[slice, slice, slice, slice]


class End:
    """An engine whose ranks are threads; see `Scene`. `content` is the model's blocks as its ranks hold them."""

    def __init__(
        self, name: str, shards: list[KVShard], memory: FakeSharedMemory, make: Callable[..., Carriers] | None = None
    ) -> None:
        self.name = name
        self.seen: list[PlaneEvent] = []
        self.is_over = False
        self.num_finished = 0
        self.fence = StepFence(lambda _: None, 1)
        self.pools: list[TorchPool] = []
        self.ranks: list[PlaneRank] = []
        make = make or (lambda copies, most: IpcCarriers(memory, copies))
        for shard in shards:
            size = len(shard.layers) * 2 * len(shard.heads) * HEAD_BYTES
            self.pools.append(TorchPool(NUM_BLOCKS, size))
            device = LocalDevice(self.pools[-1], {"cuda_ipc": make})
            self.ranks.append(PlaneRank(device, lambda: self.num_finished, self.fence, lambda: self.is_over))
        self.shards = shards

    def open(self) -> End:
        planes = [rank.asked.open(OPENING) for rank in self.ranks]
        self.plane = RankedPlane("cuda_ipc", planes, NoTurns(), self.shards, WHOLE_BYTES, PATIENCE_S)
        return self

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    @property
    def content(self) -> np.ndarray:
        whole = np.zeros((NUM_BLOCKS, LAYERS, 2, HEADS, HEAD_BYTES), np.uint8)
        for shard, pool in zip(self.shards, self.pools, strict=True):
            part = whole[_region(shard)]
            part[:] = pool.blocks.numpy().reshape(part.shape)
        return whole

    def fill(self, whole: np.ndarray) -> None:
        for shard, pool in zip(self.shards, self.pools, strict=True):
            pool.blocks[:] = torch.from_numpy(whole[_region(shard)].reshape(NUM_BLOCKS, -1))


class NoTurns(AtOnce):
    """No copy engine waits for one."""

    def __init__(self) -> None:
        pass


def _region(shard: KVShard) -> Region:
    layers, heads = (slice(one.start, one.stop) for one in (shard.layers, shard.heads))
    return slice(None), layers, slice(None), heads


BLOCKS = np.random.default_rng(0).integers(1, 256, (NUM_BLOCKS, LAYERS, 2, HEADS, HEAD_BYTES), np.uint8)


class Pair(Scene):
    def __init__(self, prefill: list[KVShard], decode: list[KVShard], memory: FakeSharedMemory | None = None) -> None:
        memory = memory or FakeSharedMemory()
        self.p, self.d = End("p", prefill, memory).open(), End("d", decode, memory).open()
        super().__init__(self.p, self.d)  # type: ignore[arg-type]
        self.p.fill(BLOCKS)
        self.join(self.p, self.d)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        for end in (self.p, self.d):
            end.close()

    def told(self, end: End, kind: type[PlaneEvent]) -> PlaneEvent:
        return self.wait_for(end, kind)[0]  # type: ignore[arg-type]

    def send(self, seq: int, *blocks: int, held: memoryview | None = None) -> None:
        self.p.plane.send("d", Frame(TRANSFER, 1, seq, 2 * seq, blocks, held))


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(prefill: list[KVShard], decode: list[KVShard], memory: FakeSharedMemory | None = None) -> Pair:
        made.append(Pair(prefill, decode, memory))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # who asks has descriptors of its own


SIDES = {"alone": ALONE, "heads": BY_HEAD, "layers": BY_LAYER}


@pytest.mark.parametrize(
    ("prefill", "decode"), [("heads", "alone"), ("alone", "heads"), ("heads", "heads"), ("layers", "heads")]
)
def test_frames_are_whole_once_all_lanes_have_brought_their_part(
    pairs: Callable[..., Pair], prefill: str, decode: str
) -> None:
    pair = pairs(SIDES[prefill], SIDES[decode])
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [7, 3, 4, 0]))
    pair.send(0, 1, 2)
    pair.send(1, held=memoryview(BLOCKS[[9, 5]].tobytes()))
    for seq in range(2):
        sent, arrived = pair.told(pair.p, FrameSent), pair.told(pair.d, FrameArrived)
        assert isinstance(sent, FrameSent)
        assert isinstance(arrived, FrameArrived)
        assert (sent.peer, arrived.peer) == ("d", "p")
        assert sent.seq == arrived.seq == seq
        assert sent.num_bytes == arrived.num_bytes == 2 * WHOLE_BYTES
        assert sent.checksum == arrived.checksum
    assert (pair.d.content[[7, 3, 4, 0]] == BLOCKS[[1, 2, 9, 5]]).all()
    assert not pair.d.content[[1, 2, 5, 6, 8, 9, 10, 11]].any()
    pair.d.plane.forget(TRANSFER)
    pair.p.plane.withdraw(TRANSFER)
    assert pair.told(pair.d, Landed) == Landed(TRANSFER)
    assert pair.told(pair.p, Withdrawn) == Withdrawn(TRANSFER)


def test_blocks_are_touched_once_a_rank_is_done_with_steps(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, BY_HEAD)
    pair.p.fence.num_launched = pair.p.fence.num_taken = 3
    pair.d.fence.num_launched, pair.d.fence.num_taken = 5, 4
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    pair.send(0, 1, 2)
    pair.pump()
    assert pair.p.seen == pair.d.seen == []
    assert not pair.d.content.any()
    pair.p.num_finished, pair.d.num_finished = 3, 4
    pair.told(pair.d, FrameArrived)
    assert (pair.d.content[[0, 1]] == BLOCKS[[1, 2]]).all()


def test_what_comes_for_blocks_that_may_not_be_written_yet_waits_and_nothing_else_does(
    pairs: Callable[..., Pair],
) -> None:
    pair = pairs(BY_HEAD, BY_HEAD)
    rank = next(iter(pair.d.plane._ranks))
    pair.d.fence.num_launched = pair.d.fence.num_taken = 1
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    said = len(pair.words)
    pair.send(0, 1, 2)
    pair.until(lambda: len(pair.words) > said + 1)  # of each lane
    assert rank.invite("q/0", WHOLE)
    assert not pair.d.content.any()
    pair.d.num_finished = 1
    pair.told(pair.d, FrameArrived)
    assert (pair.d.content[[0, 1]] == BLOCKS[[1, 2]]).all()


def test_what_is_given_up_waits_for_no_step(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, BY_HEAD)
    for end in (pair.p, pair.d):
        end.fence.num_launched = end.fence.num_taken = 1  # as of a step that nobody takes any more
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    pair.send(0, 1, 2)
    pair.d.plane.forget(TRANSFER)
    pair.p.plane.withdraw(TRANSFER)
    assert pair.told(pair.d, Landed) == Landed(TRANSFER)
    assert pair.told(pair.p, Withdrawn) == Withdrawn(TRANSFER)
    pair.d.plane.land("p", Landing(TRANSFER, 2, 0, [0, 1]))
    pair.send(1, 1, 2)
    pair.d.plane.disconnect("p", "target")
    pair.p.plane.disconnect("d", "source")
    pair.p.num_finished = pair.d.num_finished = 1
    rank = next(iter(pair.p.plane._ranks))
    rank.disconnect("q/0", "source")  # behind what would have been done
    assert not [event for event in rank.events() if isinstance(event, LinkDown | FrameSent)]
    pair.p.fence.num_taken = pair.d.fence.num_launched = pair.d.fence.num_taken = 2
    next(iter(pair.d.plane._ranks)).land("p/0", Landing(TRANSFER, 3, 0, [0, 1]))  # planes are closed with it


def test_ranks_with_more_than_a_thousand_descriptors_have_planes(pairs: Callable[..., Pair]) -> None:
    with many_descriptors():
        pair = pairs(BY_HEAD, BY_HEAD)
        pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
        pair.send(0, 1, 2)
        pair.told(pair.d, FrameArrived)


def test_more_is_asked_and_told_than_the_rings_hold(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, ALONE)
    for _ in range(5000):  # answers fill the one ring, then what is asked fills the other
        pair.p.plane.withdraw(TRANSFER)
    assert len(pair.wait_for(pair.p, Withdrawn, 5000)) == 5000  # type: ignore[arg-type]


def test_a_part_that_is_damaged_refuses_the_frame(pairs: Callable[..., Pair]) -> None:
    hit: list[int] = []

    def damage(address: int, num_bytes: int) -> None:
        if not hit:
            hit.append(address)
            ctypes.c_ubyte.from_address(address).value ^= 1

    pair = pairs(BY_HEAD, BY_HEAD, memory=FakeSharedMemory(damage))
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    pair.send(0, 1, 2)
    refused = pair.told(pair.d, FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert (refused.peer, refused.reason) == ("p", "its checksum is wrong")
    pair.d.plane.forget(TRANSFER)
    pair.told(pair.d, Landed)
    assert not any(isinstance(event, FrameArrived) for event in pair.d.seen)


def test_a_link_goes_down_with_its_first_lane_and_comes_up_again(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, BY_HEAD)
    source = next(iter(pair.p.plane._ranks))
    source.disconnect("d/0", "source")  # one rank alone
    down = pair.told(pair.d, LinkDown)
    assert down == LinkDown("p", "target", "it was disconnected")
    down = pair.told(pair.p, LinkDown)
    assert isinstance(down, LinkDown)
    assert (down.peer, down.end) == ("d", "source")
    assert not [event for end in (pair.p, pair.d) for event in end.seen if isinstance(event, LinkDown)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagefleet_kv.p2p.planes.device.plane.Redial.check", lambda *_: None)
        pair.join(pair.p, pair.d)  # type: ignore[arg-type]
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    pair.send(0, 1, 2)
    pair.told(pair.d, FrameArrived)


def test_who_connects_again_ends_the_older_link(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, ALONE)
    pair.d.plane.connect("p", "127.0.0.1", pair.p.plane.invite("d"))
    down = pair.told(pair.p, LinkDown)
    assert isinstance(down, LinkDown)
    assert down.end == "source"
    assert pair.told(pair.p, LinkUp) == LinkUp("d", "source")
    assert pair.told(pair.d, LinkUp) == LinkUp("p", "target")


def test_an_invitation_is_good_once_and_other_words_are_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, ALONE)
    for data in (b"", b"\x02\0\0\0\0junk", b"\x03\0\0\0\0junk", b"\x00\xff\xff\0\0" + bytes(40)):
        pair.p.plane.hear("d", data)
    pair.d.plane.connect("q", "127.0.0.1", b"none of this plane")
    down = pair.told(pair.d, LinkDown)
    assert isinstance(down, LinkDown)
    assert down.reason == "the invitation is none of this plane"
    assert pair.p.plane.counters()["refused_connections_total"] == 3.0
    shards = next(tell for name, tell in pair.words if name == "d")
    pair.p.plane.hear("d", shards.data)  # twice, as from an engine that is our source too
    assert pair.p.plane.counters()["refused_connections_total"] == 3.0
    pair.p.plane.disconnect("d", "source")
    pair.p.plane.hear("d", shards.data)
    assert pair.p.plane.counters()["refused_connections_total"] == 4.0


def test_a_plane_that_cannot_be_had_is_said() -> None:
    def refuse(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
        raise CudaError("cudaMalloc: out of memory")

    with closing(End("p", BY_HEAD, FakeSharedMemory(), refuse)) as end, pytest.raises(NoPlane, match="out of memory"):
        end.open()


def test_nobody_waits_for_ranks_that_are_gone() -> None:
    with closing(End("p", BY_HEAD, FakeSharedMemory()).open()) as end:
        end.is_over = True
        end.plane.disconnect("d", "source")
        end.plane.withdraw(TRANSFER)
        assert end.plane.events() == []
        end.plane.close()
        end.is_over = False
        end.plane.close()  # its threads would go on


def test_a_plane_that_has_failed_is_told(pairs: Callable[..., Pair]) -> None:
    pair = pairs(BY_HEAD, ALONE)
    rank = next(iter(pair.p.plane._ranks))
    assert isinstance(rank, AskedPlane)
    rank.has_failed = True
    with pytest.raises(TransfersDead):
        pair.p.plane.events()
    rank.has_failed = False
