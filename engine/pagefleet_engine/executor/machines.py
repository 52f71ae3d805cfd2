"""The machines that an engine's ranks are on, as the leader sees them: this one, or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.local_node import LocalNode
from pagefleet_engine.executor.node import RankNode
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.rendezvous import Rendezvous, RendezvousTable
from pagefleet_engine.ranks.together import CopyShares


class Machines(Protocol):
    """Where the ranks are."""

    @property
    def nodes(self) -> Sequence[RankNode]:
        """In the order of their ranks."""
        ...

    def start(self, folder: Path, command: Sequence[str]) -> None:
        """Have all ranks started, as far as it takes no time; they load the model of a folder.

        Raises:
            ConfigError: some cannot be, or their machines did not come.
        """
        ...

    def close(self) -> None:
        """Free what is left when the nodes have ended; call this once."""
        ...


class ThisMachine:
    """Implements `Machines` where all ranks are on this one.

    Args:
        config: of the engine.
        device: that they compute on.
        shares: what each has in common with those of other copies, where they step together.
        rendezvous: answers what they ask.
        address: of this machine, where other copies that step together are elsewhere.

    Raises:
        ConfigError: it has too little for them.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        shares: Sequence[CopyShares] = (),
        rendezvous: Rendezvous | None = None,
        address: str = "",
    ) -> None:
        ranks = range(config.parallel.world_size)
        self._here = LocalNode(ranks, config, device, rendezvous or RendezvousTable(), address, shares)
        self.nodes: Sequence[RankNode] = [self._here]
        """See Machines."""

    def start(self, folder: Path, command: Sequence[str]) -> None:
        """See Machines."""
        self._here.start(str(folder), command)

    def close(self) -> None:
        """See Machines."""


def check_ranks(config: EngineConfig, device: torch.device, arch: ModelArch) -> None:
    """Raises ConfigError where the ranks cannot be, before any is started."""
    if not hasattr(os, "eventfd"):
        raise ConfigError(f"{config.parallel.describe()}, and ranks need Linux: leave it out")
    arch.stage_layers(config.parallel)
    size, whole_experts = config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel
    for rank in range(size):
        arch.of_rank(rank, size, whole_experts=whole_experts)
