"""Communicators of the NCCL plane: made on demand, few at a time, watched, given up; all by one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagefleet_kv.p2p.data_plane import MAX_INVITATION_BYTES, FrameArrived, FrameSent, LinkDown, LinkUp
from pagefleet_kv.p2p.planes.device.words import (
    Envelope,
    Go,
    Join,
    Meet,
    Park,
    PleasePark,
    Seat,
    Taken,
    Want,
    Word,
    decode_word,
    encode_word,
)
from pagefleet_kv.p2p.planes.nccl.carrier import NcclSource

from tests.fakes.byte_pages import PATIENCE_S
from tests.fakes.device_planes import DeviceEnd, Scene, nccl_maker
from tests.fakes.kv_plane import content, frame, landing
from tests.fakes.nccl_world import FakeNccl, NcclWorld


class Fleet:
    """Engines of one world; sources hold content, and each has its own transfer."""

    def __init__(self) -> None:
        self.world = NcclWorld()
        self.scene = Scene()
        self.libraries: dict[str, FakeNccl] = {}

    def add(
        self,
        name: str,
        most: tuple[int, int] = (4, 4),
        *,
        filled: bool = False,
        stall_s: float = PATIENCE_S,
        init_s: float = PATIENCE_S,
        keeps_s: float | None = None,
        version: int = 22907,
    ) -> DeviceEnd:
        """Start an engine."""
        library = self.libraries[name] = FakeNccl(self.world, version)
        maker = nccl_maker(self.world, library, most, stall_s if keeps_s is None else keeps_s, init_s)
        end = DeviceEnd(name, maker, filled=filled, stall_s=stall_s)
        self.scene.ends[name] = end
        return end

    def move(self, source: DeviceEnd, target: DeviceEnd, block: int, epoch: int) -> bool:
        """Whether one block goes from a place to the same place there."""
        target.plane.land(source.name, landing([block], epoch=epoch))
        source.plane.send(target.name, frame(0, 0, [block], epoch=epoch))
        self.scene.wait_for(target, FrameArrived)
        return target.pool.peek(block) == content(block)

    def down(self, end: DeviceEnd) -> str:
        """Why a link ended there."""
        (event,) = self.scene.wait_for(end, LinkDown)
        assert isinstance(event, LinkDown)
        return event.reason

    def said(self, kind: type[Word]) -> int:
        """How many words of a kind were said."""
        return sum(isinstance(decode_word(tell.data)[1], kind) for _, tell in self.scene.words)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.scene.close()
    assert not made.world.ranks, "a communicator was left to itself"


def test_one_thread_of_an_engine_calls_nccl(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    fleet.scene.join(target, source)
    assert fleet.move(source, target, 5, 1)
    target.plane.disconnect("p", "target")
    fleet.scene.wait_for(source, LinkDown)
    assert [len(library.callers) for library in fleet.libraries.values()] == [1, 1]


def test_a_link_has_a_communicator_when_it_is_up_and_none_when_it_ends(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    assert len(fleet.world.ranks) == 2
    assert source.plane.counters()["communicators"] == target.plane.counters()["communicators"] == 1.0
    target.plane.disconnect("p", "target")
    fleet.scene.wait_for(source, LinkDown)
    assert not fleet.world.ranks
    assert source.plane.counters()["communicators"] == target.plane.counters()["communicators"] == 0.0


def test_a_source_parks_the_communicator_that_idles_longest_and_makes_it_again(fleet: Fleet) -> None:
    source = fleet.add("p", (2, 0), filled=True)
    targets = [fleet.add(name) for name in ("a", "b", "c")]
    for target in targets:
        fleet.scene.join(source, target)
    assert source.plane.counters()["communicators"] == 2.0
    for epoch in range(1, 4):
        for at, target in enumerate(targets):
            assert fleet.move(source, target, 10 * epoch + at, epoch)
            assert len(fleet.world.ranks) <= 5  # two pairs, and a half that has not heard yet
    counters = source.plane.counters()
    assert counters["communicators"] == 2.0
    assert counters["communicators_parked_total"] >= 4.0
    assert counters["broken_links_total"] == 0.0


def test_a_target_asks_a_source_that_idles_for_its_room(fleet: Fleet) -> None:
    target = fleet.add("d", (0, 1))
    sources = [fleet.add(name, filled=True) for name in ("a", "b")]
    for source in sources:
        fleet.scene.join(source, target)
    for epoch in range(1, 4):
        for at, source in enumerate(sources):
            assert fleet.move(source, target, 10 * epoch + at, epoch)
    assert fleet.said(PleasePark) >= 5
    assert target.plane.counters()["communicators"] == 1.0
    assert target.plane.counters()["communicators_made_total"] >= 6.0


def test_a_source_that_keeps_an_idle_seat_loses_its_link(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fleet.add("d", (0, 1), keeps_s=0.1)
    greedy, other = fleet.add("a", filled=True), fleet.add("b", filled=True)
    fleet.scene.join(greedy, target)
    monkeypatch.setattr(NcclSource, "give_up", lambda source: False)
    target.plane.connect("b", "127.0.0.1", other.plane.invite("d"))
    assert "keeps a seat that others wait for" in fleet.down(target)
    fleet.scene.until(lambda: LinkUp("b", "target") in target.seen)
    assert fleet.move(other, target, 5, 1)


def test_a_communicator_that_is_in_use_is_not_given_up(fleet: Fleet) -> None:
    source = fleet.add("p", (1, 0), filled=True)
    busy, other = fleet.add("a"), fleet.add("b")
    fleet.scene.join(source, busy)
    fleet.world.nothing_moves = True
    busy.plane.land("p", landing([5]))
    source.plane.send("a", frame(0, 0, [5]))
    fleet.scene.until(lambda: fleet.said(Go) == 1)
    other.plane.connect("p", "127.0.0.1", source.plane.invite("b"))
    fleet.scene.until(lambda: source.plane.counters()["communicators"] == 1.0 and fleet.said(Park) == 0)
    source.plane.disconnect("a", "source")  # and with that there is room
    fleet.world.nothing_moves = False
    fleet.scene.wait_for(other, LinkUp)
    assert fleet.move(source, other, 6, 2)


def test_engines_at_their_limit_that_want_each_other_do_not_wait_in_a_circle(fleet: Fleet) -> None:
    names = ("a", "b", "c")
    ends = [fleet.add(name, (1, 1), filled=True) for name in names]
    for source in ends:
        for target in ends:
            if source is not target:
                target.plane.connect(source.name, "127.0.0.1", source.plane.invite(target.name))
    for end in ends:
        fleet.scene.wait_for(end, LinkUp, 4)
    for epoch in range(1, 3):
        for at, source in enumerate(ends):
            for target in ends:
                if source is not target:
                    assert fleet.move(source, target, 10 * epoch + at, 10 * epoch + at)


def test_ranks_that_never_meet_end_the_attempt(fleet: Fleet) -> None:
    fleet.world.nobody_meets = True
    source, target = fleet.add("p", filled=True, init_s=0.2), fleet.add("d", init_s=0.2)
    target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
    reasons = {fleet.down(source), fleet.down(target)}
    assert any("did not come" in reason for reason in reasons)
    assert not fleet.world.ranks


def test_a_transfer_that_does_not_end_is_aborted(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True, stall_s=0.3), fleet.add("d", stall_s=0.3)
    fleet.scene.join(source, target)
    fleet.world.nothing_moves = True
    target.plane.land("p", landing([5]))
    source.plane.send("d", frame(0, 0, [5]))
    assert {fleet.down(source), fleet.down(target)} & {
        "the other rank was silent for too long",
        "it was silent for too long",
    }
    assert not fleet.world.ranks
    assert source.plane.counters()["broken_links_total"] == 1.0


def test_an_error_of_nccl_ends_the_link_with_its_words(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    fleet.world.nothing_moves = True
    source.plane.send("d", frame(0, 0, [5]))
    fleet.scene.until(lambda: fleet.said(Go) == 1)
    fleet.world.fail_all("ncclRemoteError: a peer has exited")
    assert "a peer has exited" in fleet.down(source)
    assert fleet.down(target)


def test_a_communicator_that_nccl_refuses_ends_the_attempt(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.libraries["p"].refuses = "ncclCommInitRankConfig: Duplicate GPU detected"
    target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
    assert "Duplicate GPU" in fleet.down(source)
    assert "Duplicate GPU" in fleet.down(target)


def test_two_versions_of_nccl_do_not_meet(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True, version=22809), fleet.add("d")
    target.plane.connect("p", "127.0.0.1", source.plane.invite("d"))
    assert fleet.down(target) == "NCCL is 2.28.9 there, 2.29.7 here"


def test_a_source_that_says_more_than_a_version_is_not_met(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    invitation = source.plane.invite("d")
    target.plane.connect("p", "127.0.0.1", invitation.ljust(MAX_INVITATION_BYTES, b"\xff"))
    assert "NCCL is" in fleet.down(target)


def test_a_frame_is_the_sources_no_more_before_the_target_takes_it(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    fleet.world.nothing_moves = True
    source.plane.send("d", frame(0, 0, [5]))
    (sent,) = fleet.scene.wait_for(source, FrameSent)
    assert isinstance(sent, FrameSent)
    assert sent.seq == 0
    assert not target.seen


@pytest.mark.parametrize("word", [Go(0), Want(1), Meet(1, b"i" * 128)], ids=["go", "want", "meet"])
def test_a_target_that_says_what_makes_no_sense_loses_its_link(fleet: Fleet, word: Word) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    say(fleet, source, True, word)
    assert fleet.down(source)
    assert fleet.down(target)


@pytest.mark.parametrize("word", [Go(0), Taken(0), Seat(1), Want(2), Meet(1, b"i" * 128)])
def test_a_source_that_says_what_makes_no_sense_loses_its_link(fleet: Fleet, word: Word) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    say(fleet, target, False, word)
    assert fleet.down(target)
    assert fleet.down(source)


def test_a_source_that_would_meet_without_a_seat_loses_its_link(fleet: Fleet) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    say(fleet, target, False, Park(1))
    say(fleet, target, False, Meet(1, b"i" * 128), ahead=2)
    assert "no seat" in fleet.down(target)
    assert fleet.down(source)


def test_a_source_that_would_meet_before_it_asks_loses_its_link(fleet: Fleet) -> None:
    target = fleet.add("d")
    invitation = fleet.add("p", filled=True).plane.invite("d")
    target.plane.connect("nobody", "127.0.0.1", invitation)
    fleet.scene.until(lambda: fleet.said(Join) == 1)
    token = decode_word(fleet.scene.words[-1][1].data)[0].token
    target.plane.hear("nobody", encode_word(Envelope(token, False, 0), Meet(0, b"i" * 128)))
    assert "no seat" in fleet.down(target)


@pytest.mark.parametrize("word", [Seat(7), PleasePark(7)])
def test_words_about_communicators_of_before_change_nothing(fleet: Fleet, word: Word) -> None:
    source, target = fleet.add("p", filled=True), fleet.add("d")
    fleet.scene.join(source, target)
    say(fleet, source, True, word)
    source.plane.send("d", frame(0, 0, [5]))
    fleet.scene.wait_for(source, FrameSent)
    assert source.plane.counters()["communicators_parked_total"] == 0.0


def say(fleet: Fleet, to: DeviceEnd, to_source: bool, word: Word, ahead: int = 1) -> None:
    """Let an end hear a word as the next of its link, or as the one `ahead` of the last that was really said."""
    envelopes = [decode_word(tell.data)[0] for _, tell in fleet.scene.words]
    last = [envelope for envelope in envelopes if envelope.to_source == to_source][-1]
    other = "d" if to_source else "p"
    to.plane.hear(other, encode_word(Envelope(last.token, to_source, last.number + ahead), word))
