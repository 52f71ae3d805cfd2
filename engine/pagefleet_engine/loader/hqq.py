"""Checkpoints of HQQ as tensors that a model has slots for.

Beside a layer's bias such a file has W_q, scale and zero, and what belongs to them, each number in a tensor. Groups of
inputs are rows, of which R = O * G follow each other; W_q has in each of its numbers those of a column of several rows,
which are R / w apart, the first in the upper bits. Value = (number - zero) * scale, with zero a float.

From these come `weight_packed`, `weight_scale` and `weight_zero_point`, as `packing` has them.
Source: HQQ's `BitPack` and `HQQLinear.state_dict` (Badri and Shaji, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import TensorSource
from pagefleet_engine.loader.derived import Checkpoint, Contents, Derived, DerivedTensors, RenamedFile, words_of

_NUMBERS = ".W_q"
_IN_NUMBER = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Of how many rows one has those of a column, by bits."""
_FLAGS = ("quant_scale", "quant_zero", "view_as_float")
"""Of what is not run: scales or zeros that are quantized too, and bytes that are told to be floats."""
_DTYPES = {3: "I32"}


def settled(files: Sequence[TensorSource]) -> Sequence[TensorSource]:
    """The same files, or of HQQ's with words instead of its numbers.

    Raises:
        ModelLoadError: they hold what no slot takes, or what belongs together differs.
    """
    layers = [name.removesuffix(_NUMBERS) for file in files for name in file.names if name.endswith(_NUMBERS)]
    if not layers:
        return files
    checkpoint, made = Checkpoint(files), dict[str, Derived]()
    with checkpoint.opened() as contents:
        for layer in layers:
            made |= _packed(layer, checkpoint, contents)
    own = set(layers)
    kept = [
        RenamedFile(
            file,
            {name: name for name in file.names if name.rpartition(".")[0] not in own or name.endswith(".bias")},
        )
        for file in files
    ]
    return [*kept, DerivedTensors(checkpoint, made)]


def _packed(layer: str, checkpoint: Checkpoint, contents: Contents) -> dict[str, Derived]:
    def said(name: str) -> list[int]:
        checkpoint.shape(f"{layer}.{name}", layer)
        numbers = contents.whole(f"{layer}.{name}")
        if numbers.is_floating_point():
            raise ModelLoadError(f"{path}: {layer}.{name} is in floats: download the checkpoint again")
        return [int(number) for number in numbers.flatten()]

    path = checkpoint.places[f"{layer}{_NUMBERS}"].path
    bits, axis, size = said("nbits"), said("axis"), said("shape")
    if flags := [name for name in _FLAGS if f"{layer}.{name}" in checkpoint.places and said(name) != [0]]:
        raise ModelLoadError(f"{path}: {layer} has {flags[0]}, which is not run: quantize again without")
    if axis != [1]:
        raise ModelLoadError(f"{path}: {layer} has groups along axis {axis}, only 1 is run: quantize again with axis 1")
    shapes = {name: checkpoint.shape(f"{layer}.{name}", layer) for name in ("W_q", "scale", "zero")}
    parts = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    wrong = ModelLoadError(
        f"{path}: the tensors of {layer} do not fit each other ({parts}; shape {size}, nbits {bits}): download the "
        "checkpoint again"
    )
    rows = shapes["scale"][0] if shapes["scale"] else 0
    if len(bits) != 1 or bits[0] not in _IN_NUMBER or len(size) != 2 or min(size) < 1 or not rows or rows % size[0]:
        raise wrong
    (outputs, inputs), groups = size, rows // size[0]
    apart = -(-rows // _IN_NUMBER[bits[0]])
    stored = checkpoint.places[f"{layer}{_NUMBERS}"].dtype(f"{layer}{_NUMBERS}")
    if (
        inputs % groups
        or inputs % 8
        or shapes["W_q"] != (apart, inputs // groups)
        or not shapes["scale"] == shapes["zero"] == (rows, 1)
        or stored != _DTYPES.get(bits[0], "U8")
    ):
        raise wrong
    kept = 8 if bits[0] > 4 else 4

    def words(contents: Contents, start: int, stop: int) -> Tensor:
        codes = _codes(contents, f"{layer}{_NUMBERS}", bits[0], apart, start * groups, stop * groups)
        return words_of(codes.view(stop - start, inputs), kept)

    def shared(name: str, contents: Contents, start: int, stop: int) -> Tensor:
        return contents.rows(f"{layer}.{name}", start * groups, stop * groups).view(-1, groups).float()

    return {
        f"{layer}.weight_packed": Derived("I32", (outputs, inputs * kept // 32), words),
        f"{layer}.weight_scale": Derived("F32", (outputs, groups), partial(shared, "scale")),
        f"{layer}.weight_zero_point": Derived("F32", (outputs, groups), partial(shared, "zero")),
    }


def _codes(contents: Contents, name: str, bits: int, apart: int, start: int, stop: int) -> Tensor:
    """uint8 of these rows."""
    bounds = [start, *range((start // apart + 1) * apart, stop, apart), stop]
    found = []
    for first, last in pairwise(bounds):
        place = first // apart
        packed = contents.rows(name, first - place * apart, last - place * apart)
        found.append((packed >> bits * (_IN_NUMBER[bits] - 1 - place) & (1 << bits) - 1).to(torch.uint8))
    return torch.cat(found)
