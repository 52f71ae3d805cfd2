"""Transfers that an engine launches in turn, as their kernels spin on a device until the other engine's run.

Ranks that share a model wait for each other in every step, on their devices, and a device may run nothing behind a
kernel that spins. So all ranks of an engine launch transfers and steps in one order, which the engine gives: a rank
asks for a turn (`Turns`), the engine gives turns (`LaunchOrder`), at one place among the steps for all ranks, whatever
machines those are on.

That no circle of devices waits for each other, even where each runs one kernel after another:

- An engine of several ranks sends or receives, not both. Of its receives at most one is under way on each device, and
  all that are have been given in one turn, so between the same two steps.
- A send is launched once its receive is.

Suppose that nothing goes on any more. The oldest that a source has launched and that has not ended is no step, which
would be at the head of all its devices, and run. So it is a send, at the head of its device; or there is nothing, and
the source comes to its next send, as ranks wait for nothing that comes later. Its receive was launched before. The
oldest of the target is no step either, so it is a receive; ours is of the same turn, and no other is on its device:
it is at the head, too. Both run. An engine of one rank has no steps that wait for others: it sends at once, receives
the parts of a peer's several ranks in turn, and those of different peers of one rank beside each other, as ever.

Copies of a model that share experts are one such engine, as their steps wait for each other, too: each copy launches
the same steps, and the oldest that was launched is at the head of all devices once every copy has come to it. Each has
a core of its own, which gives turns. Where one sends does not matter to the others. But this must not be, where A and B
are copies:

    A: a receive, step 7        B: step 7, a receive        the source of both: the send to B, the send to A

So a copy gives receives only where all that others have under way were given behind as many steps (`TurnGiver`): then
all that are under way were given between the same two steps, as in the proof. None waits for long: a copy that has
gone on by a step gives nothing before the older ones have ended, nor does any other. Cores may wait for each other's
steps, but the threads that give turns wait for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pagefleet_kv.p2p.data_plane import End, TurnAsked, TurnEnded


class Turn:
    """Of one transfer."""

    def __init__(self, number: int, tell: Callable[[TurnEnded], None]) -> None:
        self._number = number
        self._tell = tell
        self._on_launched: Callable[[], None] | None = None

    @property
    def is_given(self) -> bool:
        """Whether the transfer may be launched."""
        return self._on_launched is not None

    def give(self, on_launched: Callable[[], None]) -> None:
        """Have it launched; `on_launched` is called when that is done, or is not to be done any more."""
        self._on_launched = on_launched

    def launched(self) -> None:
        """Its kernel is on the device."""
        if self._on_launched is not None:
            self._on_launched()

    def end(self) -> None:
        """Nothing of it is on the device, nor will be."""
        self.launched()
        self._tell(TurnEnded(self._number))


class Turns:
    """Those of one device. Used by its plane's thread.

    Args:
        tell: tells the engine.
    """

    def __init__(self, tell: Callable[[TurnAsked | TurnEnded], None]) -> None:
        self._tell = tell
        self._num_asked = 0
        self._open: dict[int, Turn] = {}

    def ask(self, end: End) -> Turn:
        """Ask for a turn, for a transfer of which this is that end."""
        number = self._num_asked
        self._num_asked += 1
        turn = self._open[number] = Turn(number, self._ended)
        self._tell(TurnAsked(number, end))
        return turn

    def give(self, number: int, on_launched: Callable[[], None]) -> None:
        """Give one; see `Turn.give`."""
        if (turn := self._open.get(number)) is None:
            on_launched()
        else:
            turn.give(on_launched)

    def _ended(self, event: TurnEnded) -> None:
        del self._open[event.number]
        self._tell(event)


class TurnGiver(Protocol):
    """Has the ranks of a model launch transfers at one place among their steps. Used by one thread."""

    @property
    def is_one_of_several(self) -> bool:
        """Whether the steps wait for those of other copies of the model."""

    @property
    def bell(self) -> int | None:
        """Readable when other copies have received what kept this one from it; None: nothing does."""

    def launch(self, turns: Mapping[int, int], end: End) -> bool:
        """Have them launch the transfers of these turns, by rank, of which they are that end; returns at once. False:
        other copies receive at another place, so it was not done."""

    def rest(self) -> None:
        """Say that all that was received has ended."""

    def silence(self) -> None:
        """Take the bell's ring."""


_Asked = tuple[int, int]
"""A rank, and the number of its turn."""


class LaunchOrder:
    """Gives the ranks of one model their turns.

    Args:
        giver: passes them on.
    """

    def __init__(self, giver: TurnGiver) -> None:
        self._giver = giver
        self._receives: dict[_Asked, None] = {}
        """That wait, in order."""
        self._under_way: set[_Asked] = set()

    def asked(self, rank: int, event: TurnAsked) -> None:
        """A rank asks. A send waits for nothing, as its receive is launched."""
        if event.end == "source":
            self._giver.launch({rank: event.number}, "source")
        else:
            self._receives[rank, event.number] = None

    def ended(self, rank: int, event: TurnEnded) -> None:
        """A rank's transfer is over, or will never be."""
        self._receives.pop((rank, event.number), None)
        if (rank, event.number) in self._under_way:
            self._under_way.remove((rank, event.number))
            if not self._under_way:
                self._giver.rest()

    def go_on(self) -> None:
        """Let each rank receive what it asked for first, once all that was received before has ended."""
        self._giver.silence()
        if self._receives and not self._under_way:
            given: dict[int, int] = {}
            for rank, number in self._receives:
                given.setdefault(rank, number)
            if self._giver.launch(given, "target"):
                for one in given.items():
                    self._under_way.add(one)
                    del self._receives[one]
