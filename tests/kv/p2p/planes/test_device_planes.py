"""Both device planes, without a device: whole blocks arrive where they should, and nothing arrives anywhere else."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
from pagefleet_kv.p2p.data_plane import (
    MAX_INVITATION_BYTES,
    MAX_TELL_BYTES,
    Frame,
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    Tell,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.device.words import (
    Announce,
    Envelope,
    Join,
    Taken,
    decode_word,
    encode_word,
)
from pagefleet_kv.p2p.planes.landing import FrameName
from pagefleet_kv.p2p.planes.shell import MAX_INVITATIONS
from pagefleet_protocol.kv_blob import BlobHeader

from tests.fakes.device_planes import SLOT_BYTES, DeviceEnd, Scene, ipc_maker, nccl_maker
from tests.fakes.kv_plane import BLOCK, COMPATIBILITY, GARBAGE, NUM_BLOCKS, TRANSFER, content, frame, landing
from tests.fakes.many_descriptors import many_descriptors
from tests.fakes.nccl_world import FakeSharedMemory, NcclWorld

KINDS = ("nccl", "cuda_ipc")


class Pair:
    """A source `p` and a target `d`, joined; `memory` and `world`: where to break things."""

    def __init__(self, kind: str, stall_s: float = 60.0) -> None:
        self.world, self.memory = NcclWorld(), FakeSharedMemory()

        def end(name: str, filled: bool) -> DeviceEnd:
            make = nccl_maker(self.world, stall_s=stall_s) if kind == "nccl" else ipc_maker(self.memory)
            return DeviceEnd(name, make, filled=filled, stall_s=stall_s)

        self.source, self.target = end("p", True), end("d", False)
        self.scene = Scene(self.source, self.target)
        self.scene.join(self.source, self.target)

    def works(self, block: int = 200) -> bool:
        """Whether a transfer of one block arrives as it was sent: the canary."""
        self.target.plane.land("p", landing([block], epoch=99))
        self.source.plane.send("d", frame(0, 0, [7], epoch=99))
        self.scene.wait_for(self.target, FrameArrived)
        return self.target.pool.peek(block) == content(7)

    def refused(self) -> str:
        """Why the next frame was."""
        (event,) = self.scene.wait_for(self.target, FrameRefused)
        assert isinstance(event, FrameRefused)
        return event.reason

    def down(self, end: DeviceEnd) -> str:
        """Why the link ended there."""
        (event,) = self.scene.wait_for(end, LinkDown)
        assert isinstance(event, LinkDown)
        return event.reason

    def untouched(self, blocks: range) -> bool:
        """Whether none of the target's blocks was written to."""
        return all(self.target.pool.peek(block) == GARBAGE for block in blocks)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.scene.close()


@pytest.mark.parametrize("kind", KINDS)
def test_frames_arrive_in_a_process_with_more_than_a_thousand_descriptors(kind: str) -> None:
    with many_descriptors():
        pair = Pair(kind)
        assert pair.works()
        pair.scene.close()


def test_frames_arrive_in_the_blocks_of_their_landing(pair: Pair) -> None:
    sent, into = random.Random(3).sample(range(NUM_BLOCKS), 30), random.Random(4).sample(range(NUM_BLOCKS), 30)
    pair.target.plane.land("p", landing(into, first=5))
    sizes, first = (1, 7, 16, 6), 0
    for seq, size in enumerate(sizes):
        pair.source.plane.send("d", frame(seq, 5 + first, sent[first : first + size]))
        first += size
    arrived = pair.scene.wait_for(pair.target, FrameArrived, len(sizes))
    told = pair.scene.wait_for(pair.source, FrameSent, len(sizes))
    assert [pair.target.pool.peek(block) for block in into] == [content(block) for block in sent]
    for event, sending, size in zip(arrived, told, sizes, strict=True):
        assert isinstance(event, FrameArrived)
        assert isinstance(sending, FrameSent)
        assert (event.num_blocks, event.num_bytes) == (size, size * BLOCK) == (size, sending.num_bytes)
        assert event.checksum == sending.checksum
    assert isinstance(arrived[2], FrameArrived)
    assert (arrived[2].peer, arrived[2].transfer_id, arrived[2].seq, arrived[2].first_block) == ("p", TRANSFER, 2, 13)
    others = set(range(NUM_BLOCKS)) - set(into)
    assert all(pair.target.pool.peek(block) == GARBAGE for block in others)


def test_blocks_that_left_the_pool_are_sent_from_memory(pair: Pair) -> None:
    pair.target.plane.land("p", landing([9, 3]))
    pair.source.plane.send("d", Frame(TRANSFER, 1, 0, 0, (), memoryview(bytearray(content(300) + content(301)))))
    pair.scene.wait_for(pair.target, FrameArrived)
    assert (pair.target.pool.peek(9), pair.target.pool.peek(3)) == (content(300), content(301))


def test_memory_that_cannot_be_written_is_sent_too(pair: Pair) -> None:
    pair.target.plane.land("p", landing([9]))
    pair.source.plane.send("d", Frame(TRANSFER, 1, 0, 0, (), memoryview(content(300))))
    pair.scene.wait_for(pair.target, FrameArrived)
    assert pair.target.pool.peek(9) == content(300)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(0, 0, [1], epoch=2), "epoch"),
        (frame(1, 0, [1]), "out of order"),
        (frame(0, 1, [1]), "out of order"),
        (frame(0, 0, [1, 2, 3]), "more than were reserved"),
        (frame(0, 0, [1], transfer_id=b"x" * 16), "no transfer"),
    ],
    ids=["epoch", "number", "block", "length", "transfer"],
)
def test_a_frame_that_is_not_the_next_touches_nothing(pair: Pair, sent: Frame, why: str) -> None:
    pair.target.plane.land("p", landing([10, 11]))
    pair.source.plane.send("d", sent)
    assert why in pair.refused()
    assert pair.untouched(range(NUM_BLOCKS))
    assert pair.works()


def test_a_frame_that_comes_twice_is_taken_once(pair: Pair) -> None:
    pair.target.plane.land("p", landing([10, 11]))
    pair.source.plane.send("d", frame(0, 0, [1]))
    pair.source.plane.send("d", frame(0, 0, [2]))
    pair.scene.wait_for(pair.target, FrameArrived)
    pair.refused()
    assert pair.target.pool.peek(10) == content(1)
    assert pair.target.pool.peek(11) == GARBAGE


def test_a_landing_is_for_one_peer(pair: Pair) -> None:
    pair.target.plane.land("somebody else", landing([10]))
    pair.source.plane.send("d", frame(0, 0, [1]))
    pair.refused()
    assert pair.target.pool.peek(10) == GARBAGE


def test_a_frame_whose_transfer_was_given_up_on_its_way_reaches_no_block(pair: Pair) -> None:
    held: list[Tell] = []

    def hold(tell: Tell) -> bool:
        announces = isinstance(decode_word(tell.data)[1], Announce)
        held.extend([tell] * announces)
        return announces

    pair.scene.lose = hold
    pair.target.plane.land("p", landing([10]))
    pair.source.plane.send("d", frame(0, 0, [1]))
    pair.scene.until(lambda: bool(held), "the announcement")
    pair.target.plane.forget(TRANSFER)
    assert pair.scene.wait_for(pair.target, Landed) == [Landed(TRANSFER)]
    pair.scene.lose = lambda tell: False
    pair.target.plane.hear("p", held[0].data)
    assert "no transfer" in pair.refused()
    assert pair.target.pool.peek(10) == GARBAGE
    assert pair.works()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 8, 2 * BLOCK - 1])
def test_damage_is_found(kind: str, at: int) -> None:
    pair = Pair(kind)

    def damage(address: int, num_bytes: int) -> None:
        assert num_bytes == 2 * BLOCK
        byte = ctypes.c_ubyte.from_address(address + at)
        byte.value ^= 0x10

    pair.world.damage = pair.memory.damage = damage
    pair.target.plane.land("p", landing([1, 2]))
    pair.source.plane.send("d", frame(0, 0, [1, 2]))
    assert "checksum" in pair.refused()
    assert pair.untouched(range(NUM_BLOCKS))
    pair.world.damage = pair.memory.damage = None
    assert pair.works()
    pair.scene.close()


def lie(pair: Pair, **changes: int) -> None:
    """Let the target hear an announcement as if the source had said it."""
    fields = {"num_blocks": 1, "num_bytes": BLOCK, "number": 0, "slot": 0} | changes
    name = FrameName(TRANSFER, 1, 0).encode()
    header = BlobHeader(COMPATIBILITY, name, 0, fields["num_blocks"], fields["num_bytes"], 0)
    said = [envelope for name, tell in pair.scene.words if name == "p" for envelope in [decode_word(tell.data)[0]]]
    envelope = Envelope(said[-1].token, False, said[-1].number + 1)
    word = Announce(fields["number"], fields["slot"], 0, header.encode())
    pair.target.plane.hear("p", encode_word(envelope, word))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": BLOCK + 1},
        {"num_blocks": 0, "num_bytes": 0},
        {"num_blocks": 2 * SLOT_BYTES // BLOCK, "num_bytes": 2 * SLOT_BYTES},
        {"number": 1},
    ],
    ids=["other blocks", "no blocks", "too long", "not the next"],
)
def test_a_source_that_lies_loses_its_link_and_nothing_else(pair: Pair, changes: dict[str, int]) -> None:
    pair.target.plane.land("p", landing(range(8)))
    lie(pair, **changes)
    assert pair.down(pair.target)
    assert pair.untouched(range(NUM_BLOCKS))
    pair.down(pair.source)  # it is told


def test_a_peer_whose_link_broke_is_left_alone_and_then_dialled_again(pair: Pair) -> None:
    lie(pair, number=1)
    pair.down(pair.target)
    pair.target.plane.connect("p", "127.0.0.1", pair.source.plane.invite("d"))
    assert "left alone" in pair.down(pair.target)

    def up() -> bool:
        if isinstance(pair.target.seen[-1], LinkDown):
            pair.target.seen.clear()
        if not pair.target.seen:
            pair.target.plane.connect("p", "127.0.0.1", pair.source.plane.invite("d"))
            pair.scene.until(lambda: bool(pair.target.seen))
        return isinstance(pair.target.seen[-1], LinkUp)

    pair.target.seen.append(LinkDown("p", "target", "at first"))
    pair.scene.until(up, "another link")
    assert pair.works()


def test_a_slot_that_is_not_there_is_not_read() -> None:
    pair = Pair("cuda_ipc")
    lie(pair, slot=4)
    assert "not there" in pair.down(pair.target)
    assert pair.memory.opened == 0
    pair.scene.close()


@pytest.mark.parametrize("data", [b"", b"x" * 25, random.Random(5).randbytes(600)], ids=["nothing", "short", "noise"])
def test_who_says_no_word_loses_its_links(pair: Pair, data: bytes) -> None:
    pair.target.plane.hear("p", data)
    assert "something else" in pair.down(pair.target)
    pair.down(pair.source)


def test_words_of_other_links_change_nothing(pair: Pair) -> None:
    for to_source in (True, False):
        stale = encode_word(Envelope(b"o" * 16, to_source, 0), Taken(0))
        pair.target.plane.hear("p", stale)
        pair.source.plane.hear("d", stale)
        pair.target.plane.hear("nobody", stale)
    assert pair.works()


def test_a_lost_word_ends_the_link(pair: Pair) -> None:
    pair.scene.lose = lambda tell: isinstance(decode_word(tell.data)[1], Announce)
    pair.source.plane.send("d", frame(0, 0, [1]))
    pair.scene.wait_for(pair.source, FrameSent)
    pair.scene.lose = lambda tell: False
    pair.source.plane.send("d", frame(1, 1, [1]))
    assert "lost" in pair.down(pair.target)


def test_words_that_come_twice_are_heard_once(pair: Pair) -> None:
    pair.scene.twice = True
    pair.target.plane.land("p", landing(range(40)))
    for seq in range(40):
        pair.source.plane.send("d", frame(seq, seq, [seq + 100]))
    pair.scene.wait_for(pair.target, FrameArrived, 40)
    assert [pair.target.pool.peek(block) for block in range(40)] == [content(block + 100) for block in range(40)]


def test_a_withdrawn_frame_is_not_read_any_more_and_the_next_one_arrives(pair: Pair) -> None:
    pair.scene.lose = lambda tell: True  # the target takes nothing: slots fill, and frames wait for them
    pair.target.plane.land("p", landing(range(64)))
    for seq in range(8):
        pair.source.plane.send("d", frame(seq, seq, [seq]))
    pair.scene.wait_for(pair.source, FrameSent, 2)  # one link's share of the slots
    pair.source.plane.withdraw(TRANSFER)
    assert pair.scene.wait_for(pair.source, Withdrawn) == [Withdrawn(TRANSFER)]
    for block in range(8):
        pair.source.pool.poke(block, GARBAGE)  # somebody else's by now
    pair.source.plane.send("d", frame(0, 0, [50], transfer_id=b"n" * 16))
    pair.scene.pump()
    assert not [event for event in pair.source.seen if isinstance(event, FrameSent)]
    waiting = [tell for name, tell in pair.scene.words if isinstance(decode_word(tell.data)[1], Announce)]
    pair.scene.lose = lambda tell: False
    for tell in waiting:
        pair.target.plane.hear("p", tell.data)  # what was announced before may still come: as it was
    pair.target.plane.land("p", Landing(b"n" * 16, 1, 0, [70]))
    arrived = pair.scene.wait_for(pair.target, FrameArrived, len(waiting) + 1)
    assert [event.transfer_id for event in arrived if isinstance(event, FrameArrived)][-1] == b"n" * 16
    assert pair.target.pool.peek(70) == content(50)
    assert [pair.target.pool.peek(block) for block in range(2)] == [content(0), content(1)]
    assert pair.untouched(range(2, 8))


def test_frames_for_nobody_and_for_who_left_end_by_the_loss_of_the_link(pair: Pair) -> None:
    pair.source.plane.send("nobody", frame(0, 0, [1]))
    assert pair.scene.wait_for(pair.source, LinkDown) == [LinkDown("nobody", "source", "it is not connected")]
    pair.target.plane.disconnect("p", "target")
    assert "disconnected" in pair.down(pair.source)
    assert not pair.target.seen  # who closes is not told


def test_a_frame_longer_than_a_slot_ends_the_link(pair: Pair) -> None:
    pair.source.plane.send("d", frame(0, 0, range(17)))
    assert "longer than a slot" in pair.down(pair.source)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_takes_nothing_is_cut_and_others_have_slots(kind: str) -> None:
    world = NcclWorld()

    def end(name: str, filled: bool = False) -> DeviceEnd:
        make = nccl_maker(world) if kind == "nccl" else ipc_maker()
        return DeviceEnd(name, make, filled=filled, stall_s=2.0 if filled else 60.0)

    source, hung, other = end("p", True), end("h"), end("d")
    scene = Scene(source, hung, other)
    scene.join(source, hung)
    scene.join(source, other)
    scene.lose = lambda tell: tell.peer == "h"
    other.plane.land("p", landing([5]))
    for seq in range(8):
        source.plane.send("h", frame(seq, seq, [seq], transfer_id=b"h" * 16))
    source.plane.send("d", frame(0, 0, [9]))
    scene.wait_for(other, FrameArrived)
    assert other.pool.peek(5) == content(9)
    (down,) = scene.wait_for(source, LinkDown)
    assert isinstance(down, LinkDown)
    assert (down.peer, "silent" in down.reason) == ("h", True)
    scene.close()


def test_an_invitation_is_good_once_and_for_whom_it_is(pair: Pair) -> None:
    invitation = pair.source.plane.invite("d")
    assert len(invitation) <= MAX_INVITATION_BYTES
    token = invitation[6:22]
    before = pair.source.plane.counters()["refused_connections_total"]
    pair.source.plane.hear("thief", encode_word(Envelope(token, True, 0), Join()))
    pair.source.plane.hear("d", encode_word(Envelope(b"f" * 16, True, 0), Join()))
    pair.scene.until(lambda: pair.source.plane.counters()["refused_connections_total"] == before + 2)
    assert pair.works()


def test_an_invitation_that_was_taken_back_or_pushed_out_is_good_no_more(pair: Pair) -> None:
    back, out = (pair.source.plane.invite(peer)[6:22] for peer in ("back", "out"))
    pair.source.plane.disconnect("back", "source")
    for _ in range(MAX_INVITATIONS):
        pair.source.plane.invite("others")
    for peer, token in (("back", back), ("out", out)):
        pair.source.plane.hear(peer, encode_word(Envelope(token, True, 0), Join()))
    pair.scene.until(lambda: pair.source.plane.counters()["refused_connections_total"] == 2.0)
    assert not pair.source.seen  # no link, and nothing happened to the one there is


@pytest.mark.parametrize("invitation", [b"", b"short", b"PFKG\x02\x00" + b"t" * 16, b"PFKG\x01\x00" + b"t" * 16])
def test_an_invitation_of_another_kind_is_told_as_lost(pair: Pair, invitation: bytes) -> None:
    pair.target.plane.connect("q", "127.0.0.1", invitation)
    assert pair.down(pair.target)


def test_who_connects_again_replaces_its_link(pair: Pair) -> None:
    pair.target.plane.connect("p", "127.0.0.1", pair.source.plane.invite("d"))
    assert "again" in pair.down(pair.source)
    pair.scene.wait_for(pair.target, LinkUp)
    assert pair.works()


@pytest.mark.parametrize("kind", KINDS)
def test_both_may_be_each_others_source_with_more_frames_than_slots(kind: str) -> None:
    pair = Pair(kind)
    pair.scene.join(pair.target, pair.source)
    pair.scene.twice = True  # as the control plane takes each word over both of its sockets
    for block in range(100, 200):
        pair.target.pool.poke(block, content(1000 + block))
    pair.target.plane.land("p", landing(range(90)))
    pair.source.plane.land("d", Landing(b"r" * 16, 1, 0, range(90)))
    sent_there, sent_back = [pair.source.pool.peek(100 + at) for at in range(90)], range(1100, 1190)
    for seq in range(30):
        at = range(100 + seq * 3, 103 + seq * 3)
        pair.source.plane.send("d", frame(seq, seq * 3, at))
        pair.target.plane.send("p", Frame(b"r" * 16, 1, seq, seq * 3, at))
    pair.scene.wait_for(pair.target, FrameArrived, 30)
    pair.scene.wait_for(pair.source, FrameArrived, 30)
    assert [pair.target.pool.peek(block) for block in range(90)] == sent_there
    assert [pair.source.pool.peek(block) for block in range(90)] == [content(number) for number in sent_back]
    assert max(len(tell.data) for _, tell in pair.scene.words) <= MAX_TELL_BYTES
    pair.scene.close()


def test_what_was_exported_and_opened_is_given_back() -> None:
    pair = Pair("cuda_ipc")
    assert pair.works()
    assert pair.memory.opened == 1
    pair.target.plane.disconnect("p", "target")
    assert pair.memory.opened == 0
    pair.scene.close()
    assert pair.memory.freed


def test_memory_that_cannot_be_opened_is_told_as_lost() -> None:
    memory = FakeSharedMemory()
    memory.refuses = True
    source, target = DeviceEnd("p", ipc_maker(), filled=True), DeviceEnd("d", ipc_maker(memory))
    scene = Scene(source, target)
    target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
    (down,) = scene.wait_for(target, LinkDown)
    assert isinstance(down, LinkDown)
    assert "cannot be read from here" in down.reason
    scene.close()
