"""How many ranks one model is spread over. Knows no torch, as configuration does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pagefleet_protocol.settings.fields import Between, check_limits

from pagefleet_engine.errors import ConfigError

# More than any machine has devices; a rank is a process.
_Ranks = Annotated[int, Between(1, 1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The ranks of one engine."""

    tensor_parallel_size: _Ranks = 1
    """Ranks that each layer is divided among, a process with a GPU of its own each, or with its share of the processor;
    all on this machine."""
    data_parallel_size: _Ranks = 1
    """Copies of the model behind one port, each on GPUs of its own, or with its share of the processor: a request goes
    to the one that has its beginning cached, or has least to do. --max-num-seqs and the like are for each."""

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)

    @property
    def world_size(self) -> int:
        """Ranks of one copy of the model."""
        return self.tensor_parallel_size
