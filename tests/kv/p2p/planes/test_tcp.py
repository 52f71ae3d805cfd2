"""The tcp plane on real sockets: whole blocks arrive where they should, and nothing arrives anywhere else."""

from __future__ import annotations

import errno
import gc
import random
import socket
import struct
import threading
import zlib

import pytest
from pagefleet_kv.errors import KVConfigError, TransfersDead
from pagefleet_kv.p2p.data_plane import (
    Frame,
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landed,
    LinkDown,
    LinkUp,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.landing import MAX_FRAME_BYTES
from pagefleet_kv.p2p.planes.shell import MAX_INVITATIONS, LinkSettings
from pagefleet_kv.p2p.planes.tcp.hello import HELLO_BYTES, Invitation
from pagefleet_kv.p2p.planes.tcp.link import PageViews
from pagefleet_kv.p2p.planes.tcp.plane import MAX_NEWCOMERS, TcpPlane
from pagefleet_kv.p2p.planes.tcp.source import SourceLink

from tests.fakes.byte_pages import PATIENCE_S, BytePages
from tests.fakes.kv_plane import (
    BLOCK,
    COMPATIBILITY,
    GARBAGE,
    NUM_BLOCKS,
    TRANSFER,
    LyingSource,
    PlaneEnd,
    content,
    frame,
    joined,
    landing,
    tcp_end,
)


def untouched(end: PlaneEnd, blocks: range) -> bool:
    return all(end.pages.peek(block) == GARBAGE for block in blocks)


def blank(end: PlaneEnd, blocks: range) -> bool:
    """Whether nothing is left there of what was never whole: it may be no numbers, and attention reads whole pages."""
    return all(end.pages.peek(block) == bytes(BLOCK) for block in blocks)


def works(source: PlaneEnd, target: PlaneEnd, block: int = 200) -> bool:
    """Whether a transfer of one block arrives as it was sent: the canary."""
    target.plane.land("p", landing([block], epoch=99))
    source.plane.send("d", frame(0, 0, [7], epoch=99))
    target.wait_for(FrameArrived)
    return target.pages.peek(block) == content(7)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_frames_arrive_in_the_blocks_of_their_landing(on_host: bool) -> None:
    sent, into = random.Random(3).sample(range(NUM_BLOCKS), 64), random.Random(4).sample(range(NUM_BLOCKS), 64)
    with joined(tcp_end(filled=True, on_host=on_host), tcp_end(on_host=on_host)) as (source, target):
        target.plane.land("p", landing(into, first=5))
        sizes, first = (1, 7, 40, 16), 0
        for seq, size in enumerate(sizes):
            source.plane.send("d", frame(seq, 5 + first, sent[first : first + size]))
            first += size
        arrived = target.wait_for(FrameArrived, len(sizes))
        told = source.wait_for(FrameSent, len(sizes))
        assert [target.pages.peek(block) for block in into] == [content(block) for block in sent]
        whole = zlib.crc32(b"".join(map(content, sent[8:48])))
        assert arrived[2] == FrameArrived("p", TRANSFER, 1, 2, 13, 40, 40 * BLOCK, whole)
        assert told[2] == FrameSent("d", TRANSFER, 1, 2, 40 * BLOCK, whole)
        others = set(range(NUM_BLOCKS)) - set(into)
        assert all(target.pages.peek(block) == GARBAGE for block in others)


def test_blocks_that_left_the_pool_are_sent_from_memory() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        held = memoryview(content(300) + content(301))
        target.plane.land("p", landing([9, 3]))
        source.plane.send("d", Frame(TRANSFER, 1, 0, 0, (), held))
        target.wait_for(FrameArrived)
        assert (target.pages.peek(9), target.pages.peek(3)) == (content(300), content(301))


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
def test_a_frame_that_is_not_the_next_touches_nothing(sent: Frame, why: str) -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        target.plane.land("p", landing([10, 11]))
        source.plane.send("d", sent)
        (refused,) = target.wait_for(FrameRefused)
        assert isinstance(refused, FrameRefused)
        assert why in refused.reason
        assert untouched(target, range(NUM_BLOCKS))
        assert works(source, target)


def test_a_frame_may_come_as_soon_as_its_landing_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        assert isinstance(target.plane, TcpPlane)
        with monkeypatch.context() as busy:  # reading: it takes no command meanwhile
            busy.setattr(target.plane._thread, "obey", lambda: None)
            target.plane.land("p", landing([10]))
            source.plane.send("d", frame(0, 0, [1]))
            target.wait_for(FrameArrived)
        assert target.pages.peek(10) == content(1)


def test_a_frame_that_comes_twice_is_taken_once() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        target.plane.land("p", landing([10, 11]))
        source.plane.send("d", frame(0, 0, [1]))
        source.plane.send("d", frame(0, 0, [2]))
        target.wait_for(FrameArrived)
        target.wait_for(FrameRefused)
        assert target.pages.peek(10) == content(1)
        assert target.pages.peek(11) == GARBAGE


def test_a_landing_is_for_one_peer() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        target.plane.land("somebody else", landing([10]))
        source.plane.send("d", frame(0, 0, [1]))
        target.wait_for(FrameRefused)
        assert target.pages.peek(10) == GARBAGE


def test_the_rest_of_a_frame_whose_transfer_was_given_up_reaches_no_block() -> None:
    target = tcp_end()
    liar = LyingSource(target)
    payload = b"".join(map(content, range(32)))
    target.plane.land("p", landing(range(32)))
    liar.socket.sendall(liar.header(payload, 32) + payload[: 4 * BLOCK])
    while target.pages.peek(3) != content(3):
        pass  # so much of it has landed
    target.plane.forget(TRANSFER)
    assert target.wait_for(Landed) == [Landed(TRANSFER)]
    assert blank(target, range(32))
    for block in range(32):
        target.pages.poke(block, GARBAGE)  # somebody else's by now
    liar.socket.sendall(payload[4 * BLOCK :])
    (refused,) = target.wait_for(FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert "given up" in refused.reason
    assert untouched(target, range(32))
    target.plane.land("p", landing([40]))  # and the connection is good for the next one
    liar.socket.sendall(liar.header(content(5), 1) + content(5))
    target.wait_for(FrameArrived)
    assert target.pages.peek(40) == content(5)
    liar.close()
    target.plane.close()


def test_damage_is_found() -> None:
    target = tcp_end()
    liar = LyingSource(target)
    target.plane.land("p", landing([1, 2]))
    liar.socket.sendall(liar.header(content(1), 1) + content(1)[:-1] + b"?")
    (refused,) = target.wait_for(FrameRefused)
    assert isinstance(refused, FrameRefused)
    assert "checksum" in refused.reason
    assert blank(target, range(1, 2))
    assert untouched(target, range(2, 3))
    liar.close()
    target.plane.close()


def lies(liar: LyingSource) -> dict[str, bytes]:
    good = liar.header(content(1), 1)
    return {
        "noise": random.Random(5).randbytes(4096),
        "damaged header": good[:-1] + bytes([good[-1] ^ 1]),
        "length of other blocks": liar.header(content(1), 1, num_bytes=BLOCK + 1),
        "no blocks": liar.header(b"", 0, num_bytes=0),
        "too long": liar.header(b"", 2 * MAX_FRAME_BYTES // BLOCK, num_bytes=2 * MAX_FRAME_BYTES),
    }


@pytest.mark.parametrize("lie", ["noise", "damaged header", "length of other blocks", "no blocks", "too long"])
def test_a_source_that_lies_loses_its_connection_and_nothing_else(lie: str) -> None:
    target = tcp_end()
    liar = LyingSource(target)
    target.plane.land("p", landing(range(8)))
    liar.socket.sendall(lies(liar)[lie])
    (down,) = target.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert "cannot be read" in down.reason or "says that it has" in down.reason
    assert untouched(target, range(8))
    liar.close()
    with joined(tcp_end(filled=True), target) as (source, _):
        assert works(source, target)


def test_a_frame_that_says_more_than_comes_stalls_and_is_cut() -> None:
    target = tcp_end(stall_s=0.2)
    liar = LyingSource(target)
    target.plane.land("p", landing(range(8)))
    liar.socket.sendall(liar.header(b"x" * 8 * BLOCK, 8) + b"x" * BLOCK)
    (down,) = target.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert "silent" in down.reason
    assert blank(target, range(8))
    liar.close()
    target.plane.close()


def test_a_withdrawn_frame_is_not_read_any_more_and_the_next_one_arrives() -> None:
    pages = BytePages(2, 16 << 20)  # more than sockets take at once
    pages.poke(0, b"a" * (16 << 20))
    source = PlaneEnd(lambda pages: TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0), pages)
    with socket.socket() as raw:
        invitation = Invitation.decode(source.plane.invite("d"))
        raw.connect(("127.0.0.1", invitation.port))
        raw.sendall(invitation.hello(COMPATIBILITY))
        source.wait_for(LinkUp)
        source.plane.send("d", frame(0, 0, [0]))
        raw.recv(32, socket.MSG_WAITALL)
        begun = raw.recv(96 + 4096, socket.MSG_WAITALL)  # the frame has begun, and then nobody reads
        source.plane.withdraw(TRANSFER)
        source.plane.send("d", frame(0, 0, [0], transfer_id=b"n" * 16))
        assert source.wait_for(Withdrawn) == [Withdrawn(TRANSFER)]
        pages.poke(0, b"b" * (16 << 20))  # somebody else's by now
        rest = bytearray(16 << 20)
        view = memoryview(rest)[4096:]
        while view:
            view = view[raw.recv_into(view) :]
        assert begun[96:] == b"a" * 4096
        assert b"b" not in rest
        assert rest.endswith(bytes(1 << 20))
        assert raw.recv(96, socket.MSG_WAITALL)[40:56] == b"n" * 16
        assert not [event for event in source.seen if isinstance(event, FrameSent)]
    source.plane.close()


def test_frames_for_nobody_and_for_who_left_end_by_the_loss_of_the_link() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        source.plane.send("nobody", frame(0, 0, [1]))
        assert source.wait_for(LinkDown) == [LinkDown("nobody", "source", "it is not connected")]
        target.plane.disconnect("p", "target")
        (down,) = source.wait_for(LinkDown)
        assert isinstance(down, LinkDown)
        assert down.peer == "d"
        assert not target.plane.events()  # who closes is not told


def test_nobody_writes_once_a_link_is_closed() -> None:
    target = tcp_end()
    liar = LyingSource(target)
    target.plane.land("p", landing(range(64)))
    payload = b"".join(map(content, range(64)))
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            try:
                liar.socket.sendall(liar.header(payload, 64) + payload)
            except OSError:
                return

    thread = threading.Thread(target=send)
    thread.start()
    while target.pages.peek(0) == GARBAGE:
        pass
    target.plane.disconnect("p", "target")
    for block in range(64):
        target.pages.poke(block, GARBAGE)
    stop.set()
    liar.close()
    thread.join()
    target.plane.close()
    assert untouched(target, range(64))


def test_an_invitation_is_good_once_and_for_who_knows_its_secret() -> None:
    source = tcp_end(filled=True)
    invitation = Invitation.decode(source.plane.invite("d"))
    forged = Invitation(invitation.port, invitation.number, b"s" * 32)
    for hello, welcome in (
        (forged.hello(COMPATIBILITY), b""),
        (invitation.hello(b"another shape".ljust(32)), b""),
        (random.Random(6).randbytes(HELLO_BYTES), b""),
        (invitation.hello(COMPATIBILITY), invitation.welcome(COMPATIBILITY)),
        (invitation.hello(COMPATIBILITY), b""),
    ):
        with socket.create_connection(("127.0.0.1", invitation.port), PATIENCE_S) as raw:
            raw.sendall(hello)
            assert raw.recv(32, socket.MSG_WAITALL) == welcome
            if welcome:
                source.wait_for(LinkUp)
    assert source.plane.counters() == {"refused_connections_total": 4.0}
    source.plane.close()


def test_a_peer_that_cannot_be_connected_to_costs_no_descriptor() -> None:
    target = tcp_end()
    target.plane.connect("p", "255.255.255.255", Invitation.draw(9).encode())
    (down,) = target.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert (down.end, down.reason.startswith("it cannot be connected to")) == ("target", True)
    target.plane.close()
    gc.collect()  # a socket that was left open would complain now


@pytest.mark.parametrize("lacks", [errno.EMFILE, errno.ENOMEM], ids=["descriptors", "memory"])
def test_an_engine_out_of_room_waits_for_some_without_haste(monkeypatch: pytest.MonkeyPatch, lacks: int) -> None:
    source, target = tcp_end(filled=True), tcp_end()
    plane = source.plane
    assert isinstance(plane, TcpPlane)
    accept = socket.socket.accept
    looks: list[float] = []

    def full(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener is plane._listener and len(looks) < 3:
            looks.append(plane._look_at)
            raise OSError(lacks, "there is no room")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    with joined(source, target):
        assert len(set(looks)) == len(looks) == 3  # one try between two looks


def test_two_that_serve_each_other_have_a_link_each_way() -> None:
    one, two = tcp_end(filled=True), tcp_end(filled=True)
    with joined(one, two):  # two calls one `p`, one calls two `d`
        one.plane.connect("d", "127.0.0.1", two.plane.invite("p"))
        assert one.wait_for(LinkUp) == [LinkUp("d", "target")]
        assert two.wait_for(LinkUp) == [LinkUp("p", "source")]
        two.plane.disconnect("p", "target")
        assert one.wait_for(LinkDown) == [LinkDown("d", "source", "the target left")]
        one.plane.land("d", landing(range(2)))
        two.plane.send("p", frame(0, 0, range(2)))
        one.wait_for(FrameArrived)


def test_an_invitation_that_was_taken_back_or_pushed_out_is_good_no_more() -> None:
    source = tcp_end(filled=True)
    back, out = (Invitation.decode(source.plane.invite(peer)) for peer in ("back", "out"))
    source.plane.disconnect("back", "source")
    for _ in range(MAX_INVITATIONS):
        source.plane.invite("others")
    for invitation in (back, out):
        with socket.create_connection(("127.0.0.1", invitation.port), PATIENCE_S) as raw:
            raw.sendall(invitation.hello(COMPATIBILITY))
            assert raw.recv(1) == b""
    source.plane.close()


def test_a_listener_that_did_not_invite_is_no_source() -> None:
    target = tcp_end()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        invitation = Invitation.draw(listener.getsockname()[1])
        target.plane.connect("p", "127.0.0.1", invitation.encode())
        with listener.accept()[0] as raw:
            raw.sendall(random.Random(7).randbytes(32))
            (down,) = target.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert "did not invite" in down.reason
    target.plane.close()


@pytest.mark.parametrize("invitation", [b"", b"short", struct.pack("<H16s32s", 1, b"n" * 16, b"s" * 32)])
def test_who_cannot_be_reached_is_told_as_lost(invitation: bytes) -> None:
    target = tcp_end()
    target.plane.connect("p", "127.0.0.1", invitation)  # port 1 has no listener
    (down,) = target.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert down.peer == "p"
    target.plane.close()


def test_strangers_wait_for_so_long_and_are_only_so_many() -> None:
    source, target = tcp_end(filled=True, handshake_s=0.3), tcp_end()
    port = Invitation.decode(source.plane.invite("nobody")).port
    crowd = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(MAX_NEWCOMERS + 8)]
    for stranger in crowd:
        assert stranger.recv(1) == b""  # cut at once, or when its time is over
        stranger.close()
    assert source.plane.counters() == {"refused_connections_total": float(MAX_NEWCOMERS + 8)}
    with joined(source, target):
        assert works(source, target)


def test_a_target_that_takes_nothing_is_cut() -> None:
    pages = BytePages(1, 32 << 20)
    source = PlaneEnd(lambda pages: TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0, stall_s=0.3), pages)
    with socket.socket() as raw:
        invitation = Invitation.decode(source.plane.invite("d"))
        raw.connect(("127.0.0.1", invitation.port))
        raw.sendall(invitation.hello(COMPATIBILITY))
        source.wait_for(LinkUp)
        source.plane.send("d", frame(0, 0, [0]))
        (down,) = source.wait_for(LinkDown)
    assert isinstance(down, LinkDown)
    assert "silent" in down.reason
    source.plane.close()


def test_a_link_whose_frames_were_all_withdrawn_is_in_no_hurry() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pages = BytePages(1, BLOCK)
        settings = LinkSettings(PageViews(pages), COMPATIBILITY, 1.0, 10.0, lambda event: None)
        link = SourceLink(ours, "d", b"", settings)
        link.queue(frame(0, 0, [0]), now=5.0)
        assert link.deadline == 15.0
        link.withdraw(TRANSFER)
        assert link.deadline == float("inf")


def test_a_target_that_speaks_is_cut() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        invitation = Invitation.decode(source.plane.invite("e"))
        with socket.create_connection(("127.0.0.1", invitation.port), PATIENCE_S) as raw:
            raw.sendall(invitation.hello(COMPATIBILITY))
            source.wait_for(LinkUp)
            raw.sendall(b"hello?")
            (down,) = source.wait_for(LinkDown)
        assert isinstance(down, LinkDown)
        assert "nothing to say" in down.reason
        assert works(source, target)


def test_who_connects_again_replaces_its_connection() -> None:
    with joined(tcp_end(filled=True), tcp_end()) as (source, target):
        target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
        (down,) = source.wait_for(LinkDown)
        assert isinstance(down, LinkDown)
        assert down.peer == "d"
        source.wait_for(LinkUp)
        assert target.wait_for(LinkUp) == [LinkUp("p", "target")]
        assert works(source, target)


def test_a_port_that_is_taken_is_a_mistake_of_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(KVConfigError, match="give another kv_port"):
        TcpPlane(BytePages(1), COMPATIBILITY, "127.0.0.1", taken.getsockname()[1])


def test_a_device_that_fails_ends_the_engine_rather_than_its_transfers_silently() -> None:
    with joined(tcp_end(filled=True, on_host=False), tcp_end()) as (source, _):
        source.pages.broken = True
        source.plane.send("d", frame(0, 0, [1]))
        with pytest.raises(TransfersDead):
            source.wait_for(FrameSent)
