"""Random weights, for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagefleet_engine.layers.quantization.scheme import STORAGE
from pagefleet_engine.loader.weight_map import Destination

# As models are initialised for training: logits stay finite and far from uniform.
_STANDARD_DEVIATION = 0.02


# Numbers of quantized matrices have this deviation, within the range of either format, and their scales undo it.
_STORED_DEVIATION = 32.0
# Normalised inputs are rarely larger than 8.
_INPUT_SCALE = 8.0 / 127.0


def fill_at_random(destinations: Mapping[str, Destination], seed: int) -> None:
    """Fill every slot: matrices and biases normal around 0, norms 1. The same seed gives the same weights anywhere."""
    generator = torch.Generator().manual_seed(seed)
    for name, destination in destinations.items():
        kind = name.rpartition(".")[2]
        if name.endswith("norm.weight") or kind in ("k_scale", "v_scale"):
            values = torch.ones(destination.shape)
        elif kind == "input_scale":
            values = torch.full(destination.shape, _INPUT_SCALE)
        elif "scale" in kind:
            values = torch.full(destination.shape, _STANDARD_DEVIATION / _STORED_DEVIATION)
        else:
            stored = destination.weight.dtype in STORAGE.values()
            deviation = _STORED_DEVIATION if stored else _STANDARD_DEVIATION
            values = torch.empty(destination.shape).normal_(0.0, deviation, generator=generator)
        destination.weight.fill(destination.part, values.clamp_(-127.0, 127.0))
