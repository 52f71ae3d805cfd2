"""What ranks of several machines are told by two threads: each machine hears it in the same order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from pagefleet_engine.executor.messages import Carry, StopTrace, Take, decode_command, encode
from pagefleet_engine.executor.node import Commands, RankNode


class Machine:
    """Stands in for a `RankNode`; takes its time."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def send(self, parts: Sequence[bytes], or_raise: Callable[[], None]) -> None:
        time.sleep(random.random() / 2000)
        self.heard.extend(parts)


def over(machines: Sequence[Machine]) -> Commands:
    nodes: Sequence[RankNode] = machines  # type: ignore[assignment]
    return Commands(nodes)


def test_steps_and_turns_come_to_all_machines_in_one_order() -> None:
    machines = [Machine() for _ in range(3)]
    commands = over(machines)

    def carry() -> None:
        for turn in range(100):
            commands.carry(lambda: False, Carry("nccl", {0: turn}), lambda _: True)

    carries = threading.Thread(target=carry)
    carries.start()
    for step in range(100):
        commands.send(encode(StopTrace(str(step))), lambda: None)
    carries.join()
    assert machines[0].heard == machines[1].heard == machines[2].heard
    told = [decode_command([one]) for one in machines[0].heard]
    assert [one.turns for one in told if isinstance(one, Carry)] == [{0: turn} for turn in range(100)]
    assert [one.stem for one in told if isinstance(one, StopTrace)] == [str(step) for step in range(100)]


def test_nothing_is_sent_any_more_once_closed() -> None:
    machine = Machine()
    commands = over([machine])
    commands.close()
    with pytest.raises(OSError, match="the engine's ranks are gone"):
        commands.send(encode(Take()), lambda: None)
    commands.carry(lambda: True, Carry("nccl", {0: 0}), lambda _: True)  # who asks does not know yet
    assert not machine.heard
