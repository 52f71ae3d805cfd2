"""Checkpoints of bitsandbytes as tensors that a model has slots for.

Beside a layer's weight such a file has what belongs to it:

    4 bits   weight [O * I / 2, 1]   weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 (JSON), and where the
                                     scales are quantized too .nested_absmax, .nested_quant_map
    8 bits   weight [O, I]           SCB [O], weight_format

From these come `weight` [O, I / 2] with `weight_absmax_nf4` or `weight_absmax_fp4` [O, I / 64], by what the codes stand
for, and `weight_scale` [O]: values = numbers * scales.
Source: transformers' and bitsandbytes' serialisation (Dettmers et al., arXiv 2305.14314 and 2208.07339).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.coded import TABLES
from pagefleet_engine.loader.checkpoint import STORED_AS, TensorSource
from pagefleet_engine.loader.derived import Checkpoint, Derived, DerivedTensors, RenamedFile, in_memory

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES = "_absmax"
_ROW_SCALES, _FORMAT = ".SCB", ".weight_format"
_LARGEST_INT8 = 127.0
_SCALES_OF = 64
"""Numbers that share a scale."""


def settled(files: Sequence[TensorSource], wanted: Collection[str]) -> Sequence[TensorSource]:
    """The same files, or of bitsandbytes' with scales worked out. What the model has slots for is `wanted`.

    Raises:
        ModelLoadError: they hold what no slot takes, or a file cannot be read.
    """
    checkpoint = Checkpoint(files)
    places = checkpoint.places
    states = {name.partition(_STATE)[0]: name for name in places if _STATE in name}
    states = {weight: state for weight, state in states.items() if weight in places}
    rows = [name for name in places if name.endswith(_ROW_SCALES)]
    if not states and not rows:
        return files
    shapes, made = dict[str, tuple[int, ...]](), dict[str, Derived]()
    tables = {name.rpartition("_")[2] for name in wanted if f"{_SCALES}_" in name}
    with checkpoint.opened() as contents:

        def read(name: str) -> Tensor:
            checkpoint.shape(name, name.rpartition(".")[0])
            return contents.whole(name).flatten()

        for weight, state in states.items():
            said = _state_of(read(state), f"{places[state].path}: {state}")
            shapes[weight] = _shape_of(said, checkpoint, weight)
            parts = {part: read(weight + part) for part in _PARTS if weight + part in places}
            scales, table = _scales(said, parts, state), said["quant_type"]
            if tables and table not in tables:
                raise ModelLoadError(
                    f"{places[state].path}: {weight} is in {table}, and config.json's bnb_4bit_quant_type is "
                    f"{', '.join(tables)}: give {table} there"
                )
            made[f"{weight}{_SCALES}_{table}"] = in_memory(scales.view(shapes[weight][0], -1))
        for name in rows:
            scales = read(name).float() / _LARGEST_INT8
            made[f"{name.removesuffix(_ROW_SCALES)}.weight_scale"] = in_memory(scales)
        for name, file in places.items():
            if name.endswith(_FORMAT) and bool(read(name).any()):
                raise ModelLoadError(
                    f"{file.path}: {name} says that the weight is stored in tiles: save the model again with a newer "
                    "bitsandbytes, as it was loaded"
                )
    hidden = {name for name in places if _STATE in name or name.endswith((*_PARTS, _ROW_SCALES, _FORMAT))}
    kept = [RenamedFile(file, {name: name for name in file.names if name not in hidden}, shapes) for file in files]
    return [*kept, DerivedTensors(checkpoint, made)]


def _state_of(characters: Tensor, name: str) -> dict[str, Any]:
    try:
        said = json.loads(bytes(characters.tolist()))
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{name} is no JSON ({error}): download the checkpoint again") from error
    if not isinstance(said, dict):
        raise ModelLoadError(f"{name} is no JSON object: download the checkpoint again")
    return said


def _shape_of(said: dict[str, Any], checkpoint: Checkpoint, weight: str) -> tuple[int, int]:
    file = checkpoint.places[weight]
    shape, block = said.get("shape"), said.get("blocksize")
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in shape)):
        raise ModelLoadError(f"{file.path}: {weight} has shape {shape} in its quant_state: download it again")
    outputs, inputs = shape
    if block != _SCALES_OF or inputs % _SCALES_OF:
        raise ModelLoadError(
            f"{file.path}: {weight} has {inputs} inputs and scales for {block} numbers: whole rows of {_SCALES_OF} are "
            "run; give another checkpoint"
        )
    stored = math.prod(checkpoint.shape(weight, weight)) * STORED_AS[file.dtype(weight)].itemsize
    if stored != outputs * inputs // 2:
        raise ModelLoadError(
            f"{file.path}: {weight} holds {stored} bytes, and {outputs} x {inputs} numbers of 4 bits are "
            f"{outputs * inputs // 2}: download the checkpoint again"
        )
    return outputs, inputs // 2


def _scales(said: dict[str, Any], parts: dict[str, Tensor], state: str) -> Tensor:
    table, scales = torch.tensor(TABLES.get(str(said.get("quant_type")), (0.0,))), parts.get(".absmax")
    stored = parts.get(".quant_map")
    if stored is None or stored.shape != table.shape or not torch.allclose(stored.float(), table, atol=1e-3):
        raise ModelLoadError(f"{state}: a table of its own (quant_map) is not run: give a checkpoint in nf4 or fp4")
    if scales is None:
        raise ModelLoadError(f"{state}: its scales (absmax) are missing: download the checkpoint again")
    scales, wanted = scales.flatten(), math.prod(said["shape"]) // _SCALES_OF
    if len(scales) != wanted:
        raise ModelLoadError(f"{state}: {len(scales)} scales, {wanted} belong to its numbers: download it again")
    if scales.dtype == torch.uint8:
        nested, values = parts.get(".nested_absmax"), parts.get(".nested_quant_map")
        size, offset = said.get("nested_blocksize"), said.get("nested_offset")
        if nested is None or values is None or not isinstance(size, int) or not isinstance(offset, float):
            raise ModelLoadError(f"{state}: scales of its scales (nested_absmax) are missing: download it again")
        if values.numel() <= int(scales.max()) or nested.numel() * size < len(scales):
            raise ModelLoadError(f"{state}: scales of its scales (nested_absmax) are too few: download it again")
        scales = values.flatten()[scales.int()] * nested.repeat_interleave(size)[: len(scales)] + offset
    return scales.float()
