"""One communicator and its seat against a scripted library and a clock by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from pagefleet_kv.p2p.data_plane import PlaneEvent, TurnAsked, TurnEnded
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies, Mark
from pagefleet_kv.p2p.planes.device.plane import FIRST_S, MAX_PEERS, MOST_S, Redial
from pagefleet_kv.p2p.planes.device.turns import Turns
from pagefleet_kv.p2p.planes.nccl.carrier import MIN_FREE_BYTES, Seats
from pagefleet_kv.p2p.planes.nccl.communicator import (
    SOURCE_RANK,
    TARGET_RANK,
    Communicator,
    CommunicatorEnd,
    CommunicatorSettings,
    NcclTransfer,
)
from pagefleet_kv.p2p.planes.nccl.library import NcclError, NcclFunctions, State
from pagefleet_kv.p2p.planes.shell import LinkBroken

from tests.fakes.device_planes import SLOT_BYTES, TorchPool


@dataclass
class Script(NcclFunctions):
    """A library that does what a test says."""

    version: int = 22907
    now: State = State.IN_PROGRESS
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def unique_id(self) -> bytes:
        return b"i" * 128

    def begin(self, unique_id: bytes, rank: int, name: str, max_ctas: int) -> int:
        self.calls.append(("begin", rank, name, max_ctas))
        return 77

    def state(self, communicator: int) -> State:
        assert communicator == 77
        return self.now

    def send(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self.calls.append(("send", address, num_bytes))
        self.now = State.IN_PROGRESS

    def recv(self, communicator: int, address: int, num_bytes: int, stream: int) -> None:
        self.calls.append(("recv", address, num_bytes))
        self.now = State.IN_PROGRESS

    def abort(self, communicator: int) -> None:
        self.calls.append(("abort",))


class NotedCopies(DeviceCopies):
    """Tells the script when a stream is waited for."""

    def __init__(self, script: Script) -> None:
        super().__init__(TorchPool(1), SLOT_BYTES)
        self._script = script

    def mark(self, stream: torch.cuda.Stream | None) -> Mark:
        self._script.calls.append(("mark",))
        return super().mark(stream)


def made(
    script: Script, rank: int = SOURCE_RANK, copies: DeviceCopies | None = None, turns: Turns | None = None
) -> Communicator:
    copies = copies or DeviceCopies(TorchPool(1), SLOT_BYTES)
    settings = CommunicatorSettings(script, copies, 2, init_s=20.0, stall_s=10.0)
    return Communicator(settings, CommunicatorEnd(b"i" * 128, rank, "kv to somebody", None, turns), now=100.0)


def transfer(number: int) -> NcclTransfer:
    return NcclTransfer(number, 4096 * (number + 1), 64)


def test_nothing_is_asked_of_a_communicator_before_the_last_call_has_taken_effect() -> None:
    script = Script()
    communicator = made(script)
    communicator.give(transfer(0), 100.0)
    communicator.give(transfer(1), 100.0)
    assert communicator.poll(101.0) == []
    assert script.calls == [("begin", 0, "kv to somebody", 2)]
    script.now = State.READY
    assert communicator.poll(102.0) == []
    assert communicator.poll(103.0) == []
    assert script.calls[1:] == [("send", 4096, 64)]
    script.now = State.READY
    assert communicator.poll(104.0) == [0]
    assert script.calls[2:] == [("send", 8192, 64)]
    script.now = State.READY
    assert communicator.poll(105.0) == [1]
    assert communicator.idle


def test_the_target_receives() -> None:
    script = Script(now=State.READY)
    communicator = made(script, TARGET_RANK)
    communicator.give(transfer(0), 100.0)
    communicator.poll(100.0)
    assert [call[0] for call in script.calls] == ["begin", "recv"]


@pytest.mark.parametrize(("when", "late"), [(119.9, False), (120.0, True)])
def test_ranks_have_so_long_to_meet(when: float, late: bool) -> None:
    communicator = made(Script())
    if late:
        with pytest.raises(NcclError, match="did not come"):
            communicator.poll(when)
    else:
        assert communicator.poll(when) == []


def test_a_transfer_has_so_long_and_idle_time_is_none_of_it() -> None:
    script = Script(now=State.READY)
    communicator = made(script)
    communicator.poll(101.0)
    assert communicator.poll(1000.0) == []
    communicator.give(transfer(0), 1000.0)
    assert communicator.poll(1009.9) == []
    with pytest.raises(NcclError, match="silent"):
        communicator.poll(1010.0)


def test_each_transfer_has_its_turn_to_be_launched() -> None:
    script, told, launched = Script(now=State.READY), list[PlaneEvent](), list[int]()
    turns = Turns(told.append)
    communicator = made(script, turns=turns)
    communicator.give(transfer(0), 100.0)
    communicator.give(transfer(1), 100.0)
    for _ in range(2):
        assert communicator.poll(1000.0) == []  # how long a turn takes to come is not its business
    assert told == [TurnAsked(0, "source")]
    assert len(script.calls) == 1
    turns.give(0, lambda: launched.append(0))
    communicator.poll(1000.0)
    assert script.calls[1:] == [("send", 4096, 64)]
    communicator.poll(1001.0)
    assert not launched
    script.now = State.READY
    assert communicator.poll(1002.0) == [0]
    assert launched[:1] == [0]
    assert told[1:] == [TurnEnded(0), TurnAsked(1, "source")]
    turns.give(1, lambda: launched.append(1))
    communicator.poll(2000.0)
    with pytest.raises(NcclError, match="silent"):  # steps of the engine may wait for it
        communicator.poll(2005.0)


def test_a_turn_that_is_given_is_not_held_by_a_rank_that_is_not_ready() -> None:
    script = Script(now=State.READY)
    turns = Turns(lambda event: None)
    communicator = made(script, turns=turns)
    communicator.give(transfer(0), 100.0)
    communicator.poll(100.0)
    script.now = State.IN_PROGRESS  # as where the other one has gone
    turns.give(0, lambda: None)
    assert communicator.poll(2000.0) == []
    with pytest.raises(NcclError, match="silent"):
        communicator.poll(2005.0)


@pytest.mark.parametrize("is_given", [False, True])
def test_nobody_waits_for_the_turn_of_what_was_aborted(is_given: bool) -> None:
    script, told, launched = Script(now=State.READY), list[PlaneEvent](), list[int]()
    turns = Turns(told.append)
    communicator = made(script, TARGET_RANK, turns=turns)
    communicator.give(transfer(0), 100.0)
    communicator.poll(100.0)
    if is_given:
        turns.give(0, lambda: launched.append(0))
    communicator.abort()
    assert told == [TurnAsked(0, "target"), TurnEnded(0)]
    turns.give(0, lambda: launched.append(0))
    assert launched
    assert [call[0] for call in script.calls] == ["begin", "abort"]


def test_it_is_aborted_once() -> None:
    script = Script()
    communicator = made(script)
    communicator.abort()
    communicator.abort()
    assert script.calls[1:] == [("abort",)]


def test_what_was_launched_has_left_the_stream_when_it_is_aborted() -> None:
    script = Script(now=State.READY)
    communicator = made(script, copies=NotedCopies(script))
    communicator.give(transfer(0), 100.0)
    communicator.poll(100.0)
    communicator.abort()
    assert script.calls[1:] == [("send", 4096, 64), ("abort",), ("mark",)]


@dataclass(eq=False)
class Owner:
    """Leaves its seat at once, soon, or not."""

    seats: Seats
    leaves: str = "now"
    num_bytes: int = 50
    asked: int = 0

    def give_up(self) -> bool:
        self.asked += 1
        if self.leaves == "now":
            self.seats.leave(self)
        return self.leaves != "never"


def test_the_least_recently_used_seat_is_given_up() -> None:
    seats = Seats([None, None], lambda: MIN_FREE_BYTES)
    a, b, c = (Owner(seats) for _ in range(3))
    assert seats.take(a)
    assert seats.take(b)
    assert seats.take(a)
    seats.use(a)
    assert seats.take(c)
    assert (a.asked, b.asked, len(seats), seats.num_bytes) == (0, 1, 2, 100)


def test_a_seat_that_is_left_soon_is_waited_for() -> None:
    seats = Seats([None], lambda: MIN_FREE_BYTES)
    slow, other = Owner(seats, "soon"), Owner(seats)
    assert seats.take(slow)
    assert not seats.take(other)
    seats.leave(slow)
    assert seats.take(other)


def test_who_does_not_leave_is_passed_over() -> None:
    seats = Seats([None, None], lambda: MIN_FREE_BYTES)
    never, idle, other = Owner(seats, "never"), Owner(seats), Owner(seats)
    assert seats.take(never)
    assert seats.take(idle)
    assert seats.take(other)
    assert (never.asked, idle.asked) == (1, 1)
    idle.leaves = "never"
    other.leaves = "never"
    assert not seats.take(idle)


def test_no_communicator_is_made_where_memory_is_short() -> None:
    free = [MIN_FREE_BYTES - 1]
    seats = Seats([None, None], lambda: free[0])
    assert not seats.take(Owner(seats))
    free[0] += 1
    assert seats.take(Owner(seats))


def test_leaving_twice_frees_one_seat() -> None:
    seats = Seats([None], lambda: MIN_FREE_BYTES)
    owner = Owner(seats)
    seats.leave(owner)
    seats.take(owner)
    seats.leave(owner)
    seats.leave(owner)
    assert seats.take(Owner(seats, "never"))
    assert not seats.take(Owner(seats))


def test_a_peer_whose_links_break_is_left_alone_for_longer_each_time() -> None:
    redial, now, pauses = Redial(), 100.0, []
    for _ in range(8):
        redial.failed("p", now)
        redial.failed("p", now)  # an attempt meanwhile counts for nothing
        pause = FIRST_S
        while True:
            try:
                redial.check("p", now + pause)
            except LinkBroken:
                pause *= 2
            else:
                break
        pauses.append(min(pause, MOST_S))
        now += pauses[-1]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    redial.worked("p")
    redial.failed("p", now)
    with pytest.raises(LinkBroken, match=r"left alone for 0\.5 s"):
        redial.check("p", now)


def test_only_so_many_peers_are_remembered() -> None:
    redial = Redial()
    for number in range(MAX_PEERS + 1):
        redial.failed(f"p{number}", 100.0)
    redial.check("p0", 100.0)
    with pytest.raises(LinkBroken):
        redial.check("p1", 100.0)
