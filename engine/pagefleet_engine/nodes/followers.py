"""All that follows on one machine: a `Follower` for each copy of the model that has ranks here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import EngineError
from pagefleet_engine.executor.vital_signs import RankProgress
from pagefleet_engine.nodes.follower import Follower, LeaderAddress


class Followers:
    """Seen from outside they are as one `Follower`: they begin, and end, together.

    Where the first copy of the model has no ranks here its link is followed too: there every machine learns whether it
    was started as the leader was, also one that comes to a port of a copy which the leader does not have.

    Args:
        configs: of each copy's engine core, on this machine.
        leader: whom they follow, and where the first copy's machines come.
        welcomed: is called once the leader has let this machine in, with the commit of its model.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        leader: LeaderAddress,
        welcomed: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        parallel = configs[0].parallel

        def follower(copy: int) -> Follower:
            port = leader.port + parallel.port_of(copy) - parallel.port_of(0)
            address = replace(leader, port=port)
            return Follower(configs[copy], parallel.node_rank, address, welcomed=welcomed)

        copies = parallel.copies_on(parallel.node_rank)
        self._with_ranks = [follower(copy) for copy in copies]
        self._all = self._with_ranks if 0 in copies else [*self._with_ranks, follower(0)]

    @property
    def is_joined(self) -> bool:
        """Whether the leader has let this machine in."""
        return any(one.is_joined for one in self._all)

    @property
    def is_ready(self) -> bool:
        """Whether all ranks of this machine have loaded."""
        return all(one.is_ready for one in self._with_ranks)

    def bring(self, folder: Path) -> None:
        """Say where the model is; from any thread."""
        for one in self._all:
            one.bring(folder)

    def give_up(self, error: EngineError) -> None:
        """Say that there is no model; from any thread. `run` raises the error."""
        for one in self._all:
            one.give_up(error)

    def stop(self) -> None:
        """Leave at once; from any thread."""
        for one in self._all:
            one.stop()

    def progress(self) -> Sequence[RankProgress]:
        """Return how far the ranks have loaded; from any thread."""
        return [rank for one in self._with_ranks for rank in one.progress()]

    def run(self) -> None:
        """Follow to the end, which is that of the first that ends.

        Raises:
            ConfigError: this machine does not belong to the leader's engine, or its ranks cannot be.
            EngineDead: the leader or a rank has ended.
        """
        with ThreadPoolExecutor(len(self._all)) as pool:
            running = [pool.submit(one.run) for one in self._all]
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            self.stop()
        for one in running:
            if one in ended:
                one.result()
