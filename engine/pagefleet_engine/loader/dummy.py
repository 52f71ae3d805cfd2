"""Random weights, for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagefleet_engine.loader.weight_map import Destination

# As models are initialised for training: logits stay finite and far from uniform.
_STANDARD_DEVIATION = 0.02


def fill_at_random(destinations: Mapping[str, Destination], seed: int) -> None:
    """Fill every slot: matrices and biases normal around 0, norms 1. The same seed gives the same weights anywhere."""
    generator = torch.Generator().manual_seed(seed)
    for name, destination in destinations.items():
        if name.endswith("norm.weight"):
            values = torch.ones(destination.shape)
        else:
            values = torch.empty(destination.shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        destination.weight.fill(destination.part, values)
