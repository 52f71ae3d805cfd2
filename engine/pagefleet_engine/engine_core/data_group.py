"""A data rank's groups where ranks step together, and its waves. Importing it imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.engine_core.waves import Waves
from pagefleet_engine.errors import ConfigError, EngineDead
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.together import TogetherHandles, WaveBoard
from pagefleet_engine.worker.device import resolve_device

PATIENCE_S = 9.0
"""That ranks which serve wait for each other. They do the same steps at the same time."""


class DataGroup:
    """One data rank among those that step together.

    Args:
        handles: of all of them.
        rank: of this one.

    Attributes:
        communicators: for its worker.
    """

    def __init__(self, handles: TogetherHandles, rank: int) -> None:
        self._rank = rank
        self._layers = SharedGroup(handles.layers, rank)
        self._agreement = SharedGroup(handles.agreement, rank)
        self._board = WaveBoard(handles, rank)
        self.communicators = Communicators(data=self._layers)

    def waves(self, compute_nothing: Callable[[], None]) -> Waves:
        """Return the rank's waves, once it has loaded: from now on others are waited for with patience only."""
        self._layers.patience_s = self._agreement.patience_s = PATIENCE_S

        def step_empty() -> None:
            self._or_dead(compute_nothing)

        return Waves(self._board, self._any_has_work, step_empty)

    def _any_has_work(self, has_work: bool) -> bool:
        told = torch.tensor([has_work], dtype=torch.int32)
        self._or_dead(lambda: self._agreement.all_reduce(told, "max"))
        return bool(told.item())

    def _or_dead(self, work: Callable[[], object]) -> None:
        """Raises EngineDead where the others cannot go on with this rank."""
        try:
            work()
        except RuntimeError as error:
            raise EngineDead(f"data rank {self._rank} lost the step of the others: {error}") from error


def data_group(config: EngineConfig, arch: ModelArch, handles: TogetherHandles | None, rank: int) -> DataGroup | None:
    """Return the group of a data rank; None where there is none, or ranks need not step together.

    Raises:
        ConfigError: they must, and cannot here.
    """
    if handles is None or not (arch.steps_together or config.parallel.enable_expert_parallel):
        return None
    together = f"the data ranks of a {arch.model_type} step together, and"
    if config.parallel.world_size > 1 or config.parallel.is_networked:
        raise ConfigError(f"{together} each is one process: leave tensor and pipeline parallel sizes out")
    if resolve_device(config.model.device).type != "cpu":
        raise ConfigError(f"{together} meet in the memory of the processor: give --device cpu, or leave data ranks out")
    return DataGroup(handles, rank)
