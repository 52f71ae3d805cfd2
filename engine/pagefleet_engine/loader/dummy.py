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
    """Fill every slot: matrices and biases normal around 0, norms 1; made where the weights are, as a GPU is faster.

    The same seed gives the same weights on any machine with the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, destination in destinations.items():
        device, shape = destination.weight.device, destination.shape
        kind = name.rpartition(".")[2]
        if name.endswith("norm.weight") or kind in ("k_scale", "v_scale"):
            values = torch.ones(shape, device=device)
        elif kind == "input_scale":
            values = torch.full(shape, _INPUT_SCALE, device=device)
        elif "scale" in kind:
            values = torch.full(shape, _STANDARD_DEVIATION / _STORED_DEVIATION, device=device)
        else:
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            stored = destination.weight.dtype in STORAGE.values()
            deviation = _STORED_DEVIATION if stored else _STANDARD_DEVIATION
            values = torch.empty(shape, device=device).normal_(0.0, deviation, generator=generators[device])
        destination.weight.fill(destination.part, values.clamp_(-127.0, 127.0))
