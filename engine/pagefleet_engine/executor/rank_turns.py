"""Turns of ranks to launch transfers, given among the steps that they are told to launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagefleet_kv.p2p.data_plane import End

from pagefleet_engine.executor.messages import Carry
from pagefleet_engine.executor.node import Commands
from pagefleet_engine.ranks.together import TurnBoard


class RankTurns:
    """Implements `TurnGiver`.

    Args:
        commands: that the ranks are given.
        is_over: whether the ranks are gone.
        board: of copies of the model that step together; None: there are none.
        plane: that carries the transfers.
    """

    def __init__(self, commands: Commands, is_over: Callable[[], bool], board: TurnBoard | None, plane: str) -> None:
        self._commands = commands
        self._is_over = is_over
        self._board = board
        self._plane = plane
        self.is_one_of_several = board is not None
        """See TurnGiver."""
        self.bell = None if board is None else board.bell
        """See TurnGiver."""

    def launch(self, turns: Mapping[int, int], end: End) -> bool:
        """See TurnGiver."""
        may = self._board.begin if self._board is not None and end == "target" else _at_any_place
        return self._commands.carry(self._is_over, Carry(self._plane, turns), may)

    def rest(self) -> None:
        """See TurnGiver."""
        if self._board is not None:
            self._board.rest()

    def silence(self) -> None:
        """See TurnGiver."""
        if self._board is not None:
            self._board.silence()


def _at_any_place(num_steps: int) -> bool:
    return True
