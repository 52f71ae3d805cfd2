"""Turns among steps, where copies of a model step together: they receive at one place at a time."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from pagefleet_engine.executor.messages import Carry, Take, decode_command, encode
from pagefleet_engine.executor.node import Commands, RankNode
from pagefleet_engine.executor.rank_turns import RankTurns
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.together import TogetherHandles, TurnBoard, WaveBoard, make_together


class Machine:
    """Stands in for a `RankNode`."""

    def __init__(self) -> None:
        self.turns: list[dict[int, int]] = []

    def send(self, parts: Sequence[bytes], or_raise: object) -> None:
        command = decode_command(parts)
        if isinstance(command, Carry):
            self.turns.append({**command.turns})


class Copy:
    def __init__(self, board: TurnBoard | None) -> None:
        self.machine = Machine()
        self.commands = Commands([cast(RankNode, self.machine)])
        self.turns = RankTurns(self.commands, lambda: False, board, "nccl")

    def step(self) -> None:
        self.commands.launch(encode(Take()), lambda: None)

    @property
    def is_rung(self) -> bool:
        assert self.turns.bell is not None
        return bool(select.select([self.turns.bell], [], [], 0)[0])


@pytest.fixture
def handles() -> Iterator[TogetherHandles]:
    made = make_together(Parallelism(data_parallel_size=3, enable_expert_parallel=True))
    yield made
    made.close()


@pytest.fixture
def copies(handles: TogetherHandles) -> list[Copy]:
    return [Copy(TurnBoard(handles, index)) for index in range(3)]


def test_copies_receive_beside_each_other_between_the_same_steps(copies: list[Copy]) -> None:
    one, two, three = copies
    for copy in copies:
        copy.step()
    assert one.turns.launch({0: 0}, "target")
    assert two.turns.launch({0: 0, 1: 0}, "target")
    three.step()
    assert not three.turns.launch({0: 0}, "target")
    assert not three.machine.turns
    two.step()
    two.turns.rest()
    assert not two.turns.launch({0: 1}, "target"), "one is still where two was"
    one.turns.rest()
    assert two.is_rung
    assert three.is_rung
    assert three.turns.launch({0: 0}, "target")
    assert two.turns.launch({0: 1}, "target")
    assert not one.turns.launch({0: 1}, "target"), "it has one step less"
    assert [copy.machine.turns for copy in copies] == [[{0: 0}], [{0: 0, 1: 0}, {0: 1}], [{0: 0}]]


def test_the_bell_rings_for_others_until_it_is_taken(copies: list[Copy]) -> None:
    one, two, three = copies
    assert one.turns.launch({0: 0}, "target")
    one.turns.rest()
    assert [copy.is_rung for copy in copies] == [False, True, True]
    two.turns.silence()
    assert [copy.is_rung for copy in copies] == [False, False, True]
    assert three.turns.launch({0: 0}, "target")


def test_sends_wait_for_nobody(copies: list[Copy]) -> None:
    one, two, _ = copies
    assert one.turns.launch({0: 0}, "target")
    two.step()
    assert two.turns.launch({0: 0}, "source")
    assert two.machine.turns == [{0: 0}]


def test_ranks_that_step_alone_receive_at_any_place() -> None:
    copy = Copy(None)
    assert copy.turns.bell is None
    assert not copy.turns.is_one_of_several
    for turn in range(2):
        assert copy.turns.launch({0: turn}, "target")
        copy.step()
    copy.turns.rest()
    copy.turns.silence()


def test_waves_and_places_share_the_board(handles: TogetherHandles, copies: list[Copy]) -> None:
    waves = [WaveBoard(handles, index) for index in range(3)]
    waves[1].call(7)
    assert copies[0].turns.launch({0: 0}, "target")
    assert [wave.newest() for wave in waves] == [7, 7, 7]
    copies[2].step()
    waves[2].call(8)
    assert not copies[2].turns.launch({0: 0}, "target")
