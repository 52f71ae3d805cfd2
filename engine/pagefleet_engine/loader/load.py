"""From a model folder to a model that can run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from pagefleet_engine.config import LoadFormat
from pagefleet_engine.layers.quantization.form import describe_forms
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.dummy import fill_at_random
from pagefleet_engine.loader.memory import check_memory, free_bytes, weight_bytes
from pagefleet_engine.loader.safetensors import fill_from_safetensors
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import Model
from pagefleet_engine.models.registry import build_model

_log = logging.getLogger(__name__)


@torch.inference_mode()
def load_model(folder: Path, arch: ModelArch, placement: Placement, load_format: LoadFormat, seed: int) -> Model:
    """Build the model and fill it: from the folder's safetensors files, or for `dummy` with random weights of `seed`.

    What is quantized is up to the arch, not the placement.

    Raises:
        ModelLoadError: the weights are missing, damaged, of another model, or do not fit in memory.
    """
    placement = replace(placement, quantization=arch.quantization)
    if arch.quantization is not None:
        widths = (arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim)
        for line in describe_forms(arch.quantization, widths, placement):
            _log.info("%s", line)
    model = build_model(arch, placement)
    check_memory(weight_bytes(arch, model.weights(), placement), free_bytes(placement.device), placement)
    destinations = weight_map(model.weights())
    if load_format == "dummy":
        fill_at_random(destinations, seed)
    else:
        fill_from_safetensors(folder, destinations, arch.tie_word_embeddings)
    return model
