"""One order of transfers and steps on devices that run one kernel after another: none waits for ever, whoever is
quicker, also where ranks are on several machines. Without it some do."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.p2p.data_plane import End, TurnAsked, TurnEnded
from pagefleet_kv.p2p.planes.device.lanes import plan_lanes
from pagefleet_kv.p2p.planes.device.turns import LaunchOrder, Turn, Turns
from pagefleet_kv.port import KVShard

from tests.fakes.kernel_queues import Kernel, KernelQueues

SHARDS = {
    "one": [KVShard(range(4), range(4))],
    "heads": [KVShard(range(4), range(first, first + 2)) for first in (0, 2)],
    "layers": [KVShard(range(first, first + 2), range(4)) for first in (0, 2)],
}
NUM_STEPS, NUM_FRAMES, MAX_IN_FLIGHT = 12, 4, 2

Command = int | Mapping[int, int]
"""A step, by its number, or turns, by rank."""
Order = Literal["one", "of turns", "of machines", "of copies"]
"""Whether commands come to all ranks in one, or turns in one of their own, or each machine gets one of its own, or
copies of a model know nothing of each other's."""


class Rank:
    """Does what its engine says, at its own pace; its turns are as those of a plane."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.num_done = 0
        self.turns = Turns(lambda event: engine.machine_of(number).told.append((number, event)))
        self.waiting: list[tuple[Turn, Callable[[], None]]] = []

    def launch_in_turn(self, end: End, launch: Callable[[], None]) -> Turn:
        turn = self.turns.ask(end)
        self.waiting.append((turn, launch))
        return turn

    def give(self, number: int) -> None:
        self.turns.give(number, lambda: None)
        for one in [one for one in self.waiting if one[0].is_given]:
            self.waiting.remove(one)
            one[1]()


class Machine:
    """Some ranks of an engine. What it is told and what it tells are on their way, each in order."""

    def __init__(self) -> None:
        self.on_its_way: deque[Command] = deque()
        self.commands: list[Command] = []
        self.told: deque[tuple[int, TurnAsked | TurnEnded]] = deque()


class Engine:
    """Its core has two threads that send, one of steps and one of turns, to one machine after another. `copies`: of its
    model, which step together, so far; it becomes the next."""

    bell = None

    def __init__(self, kind: str, num_machines: int, order: Order, copies: list[Engine]) -> None:
        copies.append(self)
        self.copies = copies
        self.place: int | None = None
        """Steps before what it receives just now."""
        self.shards = SHARDS[kind]
        self.machines = [Machine() for _ in range(min(num_machines, len(self.shards)))]
        self.ranks = [Rank(self, number) for number in range(len(self.shards))]
        self.steps: list[int] = []
        self.stray: list[Callable[[], None]] = []
        self.sending: tuple[deque[Callable[[], None]], ...] = deque(), deque()
        """By each thread, where none waits for the other."""
        self._order = order
        self.order = LaunchOrder(self)

    @property
    def is_one_of_several(self) -> bool:
        return len(self.copies) > 1

    @property
    def steps_wait(self) -> bool:
        """Whether its steps wait for other devices."""
        return len(self.ranks) > 1 or self.is_one_of_several

    def launch(self, turns: Mapping[int, int], end: End) -> bool:
        if end == "target" and self._order != "of copies":
            if any(copy.place not in (None, len(self.steps)) for copy in self.copies):
                return False
            self.place = len(self.steps)
        if self._order == "of turns":
            self._go_astray(turns)
        else:
            self._send(1, turns)
        return True

    def rest(self) -> None:
        self.place = None

    def silence(self) -> None:
        pass

    def machine_of(self, rank: int) -> Machine:
        return self.machines[rank * len(self.machines) // len(self.shards)]

    def step(self) -> None:
        self.steps.append(len(self.steps))
        self._send(0, self.steps[-1])

    def hear(self, machine: Machine, num_events: int) -> None:
        for _ in range(num_events):
            rank, event = machine.told.popleft()
            if isinstance(event, TurnAsked):
                self.order.asked(rank, event)
            else:
                self.order.ended(rank, event)
        self.order.go_on()

    @property
    def waits_for_copies(self) -> bool:
        """Whether it would receive, and nobody receives at another place any more."""
        order = self.order
        waits = self.is_one_of_several and bool(order._receives) and not order._under_way
        return waits and all(copy.place in (None, len(self.steps)) for copy in self.copies)

    def _send(self, thread: int, command: Command) -> None:
        if self._order != "of machines":
            for machine in self.machines:
                machine.on_its_way.append(command)
        else:
            self.sending[thread].extend(partial(machine.on_its_way.append, command) for machine in self.machines)

    def _go_astray(self, turns: Mapping[int, int]) -> None:
        self.stray += [partial(self.ranks[rank].give, number) for rank, number in turns.items()]


class Transfer:
    """A lane's part of a frame."""

    def __init__(self, fleet: Fleet, source: Rank, target: Rank, *, in_turn: bool) -> None:
        self.source, self.target, self.in_turn = source, target, in_turn
        self.is_over = False
        self._fleet = fleet
        self._turns: dict[Rank, Turn] = {}
        self._gone: set[Rank] = set()
        self._kernel = fleet.queues.kernel(self, 2, self._carried)

    def receive(self) -> None:
        """The frame has a slot at its target."""
        self._launch(self.target, "target", self._receive, in_turn=self.in_turn)

    def leave(self, rank: Rank) -> None:
        """The link is over at one end, and then at the other."""
        if rank in self._gone or self.is_over:
            return
        self._gone.add(rank)
        self._fleet.queues.abort(rank, self._kernel)
        self._end_turn(rank)
        self._fleet.said.append(partial(self.leave, self.source if rank is self.target else self.target))
        if len(self._gone) == 2:
            self._end()

    def _receive(self) -> None:
        self._fleet.queues.launch(self.target, self._kernel)
        self._fleet.said.append(self._go)

    def _go(self) -> None:
        send = partial(self._fleet.queues.launch, self.source, self._kernel)
        self._launch(self.source, "source", send, in_turn=self.source.engine.steps_wait)

    def _launch(self, rank: Rank, end: End, launch: Callable[[], None], *, in_turn: bool) -> None:
        if rank in self._gone:
            return
        if in_turn:
            self._turns[rank] = rank.launch_in_turn(end, launch)
        else:
            launch()

    def _carried(self) -> None:
        for rank in list(self._turns):
            self._end_turn(rank)
        self._end()

    def _end_turn(self, rank: Rank) -> None:
        if (turn := self._turns.pop(rank, None)) is not None:
            turn.end()

    def _end(self) -> None:
        self.is_over = True
        self._fleet.ended(self)


class Fleet:
    """Engines that pass K/V, each source to each target, and a draw of what happens next. Those with a + are copies of
    one model.

    `break_at`: how likely it is that a link breaks rather than that anything else happens.
    """

    def __init__(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        seed: int,
        *,
        num_machines: int = 1,
        order: Order = "one",
        break_at: float = 0.0,
    ) -> None:
        self.draw = random.Random(seed)
        self.queues = KernelQueues()
        self.sources, self.targets = (
            [engine for kind in kinds for engine in _copies(kind, num_machines, order)] for kinds in (sources, targets)
        )
        self.said: list[Callable[[], None]] = []
        """Words on their way between engines."""
        self.under_way: list[Transfer] = []
        self._break_at = break_at
        self._num_frames: dict[tuple[Rank, Rank], int] = {}
        """Of each lane, how many have begun."""
        for source in self.sources:
            for target in self.targets:
                lanes = plan_lanes(source.shards, target.shards)
                in_turn = target.steps_wait or len(lanes) > 1
                for lane in lanes:
                    self.begin(source.ranks[lane.source], target.ranks[lane.target], in_turn=in_turn)

    def begin(self, source: Rank, target: Rank, *, in_turn: bool) -> None:
        """The next frame of a lane."""
        number = self._num_frames.get((source, target), 0)
        if number < NUM_FRAMES:
            self._num_frames[source, target] = number + 1
            transfer = Transfer(self, source, target, in_turn=in_turn)
            self.under_way.append(transfer)
            transfer.receive()

    def ended(self, transfer: Transfer) -> None:
        self.under_way.remove(transfer)
        self.begin(transfer.source, transfer.target, in_turn=transfer.in_turn)

    def obey(self, rank: Rank) -> None:
        engine, number = rank.engine, rank.engine.ranks.index(rank)
        command = engine.machine_of(number).commands[rank.num_done]
        rank.num_done += 1
        if isinstance(command, int):
            self.queues.launch(rank, self.sum_of(engine, command))
        elif (turn := command.get(number)) is not None:
            rank.give(turn)

    @staticmethod
    def put(sends: deque[Callable[[], None]]) -> None:
        sends.popleft()()

    @staticmethod
    def arrive(machine: Machine) -> None:
        machine.commands.append(machine.on_its_way.popleft())

    def sum_of(self, engine: Engine, step: int) -> Kernel:
        copies = engine.copies
        return self.queues.kernel((copies[0], step), sum(len(copy.ranks) for copy in copies))

    def num_in_flight(self, engine: Engine) -> int:
        return sum(not self.sum_of(engine, step).has_run for step in engine.steps)

    @staticmethod
    def take(ready: list[Callable[[], None]], at: int) -> None:
        ready.pop(at)()

    def acts(self) -> list[Callable[[], None]]:
        """All that may happen next."""
        acts: list[Callable[[], None]] = [partial(self.take, self.said, at) for at in range(len(self.said))]
        for engine in (*self.sources, *self.targets):
            if len(engine.steps) < NUM_STEPS and self.num_in_flight(engine) < MAX_IN_FLIGHT:
                acts.append(engine.step)
            acts += [partial(self.take, engine.stray, at) for at in range(len(engine.stray))]
            acts += [partial(self.put, sends) for sends in engine.sending if sends]
            for machine in engine.machines:
                if machine.told:
                    acts.append(partial(engine.hear, machine, self.draw.randint(1, len(machine.told))))
            if engine.waits_for_copies:
                acts.append(engine.order.go_on)
            for machine in engine.machines:
                if machine.on_its_way:
                    acts.append(partial(self.arrive, machine))
            for number, rank in enumerate(engine.ranks):
                if rank.num_done < len(engine.machine_of(number).commands):
                    acts.append(partial(self.obey, rank))
        return acts

    def runs_through(self) -> bool:
        """Whether all steps are computed and all frames over, when nothing happens any more."""
        while acts := self.acts():
            if self.under_way and self.draw.random() < self._break_at:
                transfer = self.draw.choice(self.under_way)
                transfer.leave(self.draw.choice([transfer.source, transfer.target]))
            else:
                self.draw.choice(acts)()
        return not self.under_way and not self.queues.num_waiting


def _copies(kinds: str, num_machines: int, order: Order) -> list[Engine]:
    copies: list[Engine] = []
    for kind in kinds.split("+"):
        Engine(kind, num_machines, order, copies)
    return copies


FLEETS = [
    (["heads"], ["one"]),
    (["one"], ["heads"]),
    (["heads"], ["heads"]),
    (["layers"], ["heads"]),
    (["heads"], ["layers"]),
    (["heads", "layers"], ["heads", "heads"]),
    (["one", "heads"], ["heads", "layers"]),
    (["heads", "heads"], ["one", "one"]),
]
FLEETS_OF_COPIES = [
    (["one"], ["one+one"]),
    (["one+one"], ["one+one"]),
    (["heads+heads"], ["one+one+one"]),
    (["one+one", "heads"], ["heads+heads"]),
    (["heads", "layers+layers"], ["heads+heads", "one", "layers"]),
]


@pytest.mark.parametrize(("sources", "targets"), [*FLEETS, *FLEETS_OF_COPIES])
@given(seed=st.integers(0, 2**32), num_machines=st.integers(1, 2), break_at=st.sampled_from([0.0, 0.02, 0.2]))
def test_in_one_order_nothing_waits_for_ever(
    sources: list[str], targets: list[str], seed: int, num_machines: int, break_at: float
) -> None:
    assert Fleet(sources, targets, seed, num_machines=num_machines, break_at=break_at).runs_through()


@pytest.mark.parametrize(("order", "num_machines"), [("of turns", 1), ("of turns", 2), ("of machines", 2)])
@pytest.mark.parametrize(("sources", "targets"), FLEETS[2:7])
def test_in_orders_of_their_own_devices_wait_for_each_other(
    sources: list[str], targets: list[str], order: Order, num_machines: int
) -> None:
    fleets = (Fleet(sources, targets, seed, order=order, num_machines=num_machines) for seed in range(200))
    assert not all(fleet.runs_through() for fleet in fleets)


@pytest.mark.parametrize(("sources", "targets"), FLEETS_OF_COPIES)
def test_copies_that_receive_at_places_of_their_own_wait_for_each_other(sources: list[str], targets: list[str]) -> None:
    fleets = (Fleet(sources, targets, seed, order="of copies") for seed in range(200))
    assert not all(fleet.runs_through() for fleet in fleets)
