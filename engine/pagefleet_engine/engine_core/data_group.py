"""A copy of the model among those that step together: its waves. Importing it imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.engine_core.waves import Waves
from pagefleet_engine.errors import ConfigError, EngineDead
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.together import TogetherHandles, TurnBoard, WaveBoard, patience_s
from pagefleet_engine.worker.device import resolve_device


class DataGroup:
    """One copy among those that step together.

    Args:
        handles: of all of them.
        copy: this one.
        on_gpu: they may run steps as CUDA graphs.

    Attributes:
        turns: where copies agree on when they receive K/V.
    """

    def __init__(self, handles: TogetherHandles, copy: int, *, on_gpu: bool = False) -> None:
        self.handles, self.copy, self.on_gpu = handles, copy, on_gpu
        self._agreement = SharedGroup(handles.agreement, copy)
        self._board = WaveBoard(handles, copy)
        self.turns = TurnBoard(handles, copy)

    def waves(self, parallel: Parallelism) -> Waves:
        """Return the copy's waves, once it has loaded: from now on others are waited for with patience only."""
        self._agreement.patience_s = patience_s(parallel)
        join = self._join if self.on_gpu or parallel.enable_dbo else None
        return Waves(self._board, self._any_has_work, join)

    def _any_has_work(self, has_work: bool) -> bool:
        return bool(self._largest([has_work])[0])

    def _join(self, own: CommonStep) -> CommonStep:
        return CommonStep.of(self._largest(own.numbers()))

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """Of all copies, place by place. Raises EngineDead where the others cannot go on with this one."""
        told = torch.tensor(numbers, dtype=torch.int32)
        try:
            return self._agreement.all_reduce(told, "max").tolist()
        except RuntimeError as error:
            raise EngineDead(f"data rank {self.copy} lost the step of the others: {error}") from error


def data_group(config: EngineConfig, arch: ModelArch, handles: TogetherHandles | None, copy: int) -> DataGroup | None:
    """Return the group of a copy; None where there is none, or copies need not step together.

    Raises:
        ConfigError: they must, and cannot here.
    """
    if handles is None or not (arch.steps_together or config.parallel.enable_expert_parallel):
        return None
    if config.parallel.enable_dbo and arch.steps_together:
        raise ConfigError(
            f"the layers of a {arch.model_type} exchange more than experts' tokens, and not of half a step: leave "
            "enable_dbo out"
        )
    on_gpu = resolve_device(config.model.device).type == "cuda"
    return DataGroup(handles, copy, on_gpu=on_gpu)
