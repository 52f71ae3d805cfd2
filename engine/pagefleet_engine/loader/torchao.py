"""Checkpoints of torchao as tensors that a model has slots for.

The header's metadata has a class for each weight that is quantized, `X.weight`; its parts are tensors `X._weight_...`:

    Float8Tensor                 qdata e4m3 [O, I]        scale [O, 1], [1, 1] or blocks
    Int8Tensor, and              qdata int8 [O, I]        scale and zero_point [O, G] or [1, 1]
      IntxUnpackedToInt8Tensor
    Int4Tensor                   qdata int8 [O, I / 2]    scale and zero_point [G, O]
    Int4TilePackedTo4dTensor     qdata int32, in tiles    scale_and_zero [G, O, 2], both sizes rounded up

Of these come `weight` and `weight_scale` as they lie there, or `weight_packed`, `weight_scale` and `weight_zero_point`
as `packing` has them; or, where the model has floats (embeddings, a head), what the numbers stand for. The last two
have value = (number - 8) * scale + zero_point, the others (number - zero_point) * scale.

Tiles are 8 rows of 16 inputs, as tensor cores take them (`_convert_weight_to_int4pack` of torch): word p of lane t has
two inputs of each half of two tiles. Source: torchao's `safetensors_support`, and the classes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import TensorSource
from pagefleet_engine.loader.derived import Checkpoint, Contents, Derived, DerivedTensors, RenamedFile, words_of

_INSIDE, _NUMBERS = "._weight_", "_qdata"
_IN_BYTES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_PLAIN, _TILES = "Int4Tensor", "Int4TilePackedTo4dTensor"
_TYPES = {_PLAIN: ("I8", "U8"), _TILES: ("I32",)}
"""Of their numbers, as safetensors spells them."""
_PARTS = ("qdata", "scale", "zero_point", "scale_and_zero")
_MIDDLE = 8
_TILE_ROWS, _TILE_INPUTS, _LANES = 8, 16, 32
# Where in a word a tile's inputs are: two neighbours, those eight further on, and the same of the next tile.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def settled(files: Sequence[TensorSource], wanted: Collection[str]) -> Sequence[TensorSource]:
    """The same files, or of torchao's with tensors of names that are `wanted`.

    Raises:
        ModelLoadError: they hold what no slot takes, or what belongs together differs.
    """
    weights = [name for file in files for name in file.names if name.endswith(_NUMBERS) and "._" in name]
    if not weights:
        return files
    checkpoint, parts = Checkpoint(files), dict[str, list[str]]()
    for name in checkpoint.places:
        layer, inside, part = name.rpartition(_INSIDE)
        if inside:
            parts.setdefault(layer, []).append(part)
    metadata = {name: value for file in files for name, value in file.metadata.items()}
    ours, made = dict[str, str](), dict[str, Derived]()
    for name in weights:
        matrix = _matrix(name, metadata, parts, checkpoint)
        if f"{matrix.layer}.weight_packed" in wanted:
            made |= _packed(matrix, checkpoint)
        elif f"{matrix.layer}.weight_scale" in wanted:
            ours |= _as_it_lies(matrix, checkpoint, f"{matrix.layer}.weight_zero_point" in wanted)
        else:
            made[matrix.name] = _floats(matrix, checkpoint)
    kept = [
        RenamedFile(file, {ours.get(name, name): name for name in file.names if name in ours or _INSIDE not in name})
        for file in files
    ]
    return [*kept, DerivedTensors(checkpoint, made)]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One weight that is quantized."""

    layer: str
    kind: str
    """Its class."""
    said: Mapping[str, Any]
    """What the metadata has of it."""
    parts: Sequence[str]
    """Its tensors, by the ends of their names."""

    @property
    def name(self) -> str:
        return f"{self.layer}.weight"

    def part(self, kind: str) -> str:
        return f"{self.layer}{_INSIDE}{kind}"


def _matrix(
    numbers: str, metadata: Mapping[str, str], parts: Mapping[str, Sequence[str]], checkpoint: Checkpoint
) -> _Matrix:
    path = checkpoint.places[numbers].path
    layer, _, leaf = numbers.removesuffix(_NUMBERS).rpartition("._")
    name = f"{layer}.{leaf}"
    if leaf != "weight":
        raise ModelLoadError(
            f"{path}: {name} is quantized, and is no matrix of a linear layer: leave experts in one tensor out when "
            "you quantize (FqnToConfig)"
        )
    try:
        said = json.loads(metadata.get(name, ""))
        kind, data = said["_type"], said["_data"]
        if not isinstance(kind, str) or not isinstance(data, dict):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelLoadError(
            f"{path}: the header's metadata does not say of which class {name} is: save it again with transformers and "
            "torchao 0.15 or later"
        ) from None
    if kind not in (*_IN_BYTES, _PLAIN, _TILES):
        raise ModelLoadError(
            f"{path}: {name} is of torchao's class {kind[:80]!a}, which is not run: quantize again with "
            "Int4WeightOnlyConfig in the packing plain, or with 8 bits"
        )
    if strange := [part for part in parts[layer] if part not in _PARTS]:
        raise ModelLoadError(
            f"{path}: {layer}{_INSIDE}{strange[0]} changes inputs of the layer (AWQ, SmoothQuant, fixed scales), which "
            "is not run: quantize again without"
        )
    return _Matrix(layer, kind, data, parts[layer])


def _as_it_lies(matrix: _Matrix, checkpoint: Checkpoint, with_zeros: bool) -> dict[str, str]:
    """The file's names, and ours."""
    numbers, scale, zeros = map(matrix.part, ("qdata", "scale", "zero_point"))
    _check_class(matrix, checkpoint, _IN_BYTES)
    checkpoint.shape(scale, matrix.layer)
    found = {numbers: matrix.name, scale: f"{matrix.layer}.weight_scale"}
    if with_zeros:
        checkpoint.shape(zeros, matrix.layer)
        found[zeros] = f"{matrix.layer}.weight_zero_point"
    elif "zero_point" in matrix.parts:
        checkpoint.shape(zeros, matrix.layer)
        with checkpoint.opened() as contents:
            if bool(contents.whole(zeros).any()):
                raise ModelLoadError(
                    f"{checkpoint.places[zeros].path}: {zeros} holds zero points, and config.json's quant_type has "
                    "none: give there how the weights were quantized"
                )
    return found


def _packed(matrix: _Matrix, checkpoint: Checkpoint) -> dict[str, Derived]:
    """Words, scales and zero points."""
    _check_class(matrix, checkpoint, (_PLAIN, _TILES))
    outputs, inputs, groups = _sizes(matrix, checkpoint)

    def words(contents: Contents, start: int, stop: int) -> Tensor:
        return words_of(_codes(matrix, contents, start, stop)[:, :inputs], 4)

    def shared(part: int, contents: Contents, start: int, stop: int) -> Tensor:
        return _shared(matrix, contents, start, stop)[part][:, :groups]

    return {
        f"{matrix.layer}.weight_packed": Derived("I32", (outputs, inputs // 8), words),
        f"{matrix.layer}.weight_scale": Derived("F32", (outputs, groups), partial(shared, 0)),
        f"{matrix.layer}.weight_zero_point": Derived("F32", (outputs, groups), partial(shared, 1)),
    }


def _floats(matrix: _Matrix, checkpoint: Checkpoint) -> Derived:
    """What the numbers stand for."""
    if matrix.kind in _IN_BYTES:
        numbers, scale, zeros = map(matrix.part, ("qdata", "scale", "zero_point"))
        shape, scales = checkpoint.shape(numbers, matrix.layer), checkpoint.shape(scale, matrix.layer)
        has_zeros = "zero_point" in matrix.parts
        fits = len(shape) == len(scales) == 2 and not any(a % max(b, 1) for a, b in zip(shape, scales, strict=True))
        if not fits or 0 in scales or (has_zeros and checkpoint.shape(zeros, matrix.layer) != scales):
            raise _misfit(matrix, checkpoint)
        outputs, inputs = shape

        def values(contents: Contents, start: int, stop: int) -> Tensor:
            rows = torch.arange(start, stop) // (outputs // scales[0])

            def spread(name: str) -> Tensor:
                return contents.whole(name)[rows].float().repeat_interleave(inputs // scales[1], 1)

            found = contents.rows(numbers, start, stop).float()
            return (found - spread(zeros) if has_zeros else found) * spread(scale)

        return Derived("F32", (outputs, inputs), values)
    outputs, inputs, groups = _sizes(matrix, checkpoint)

    def coded(contents: Contents, start: int, stop: int) -> Tensor:
        shared = (one[:, :groups] for one in _shared(matrix, contents, start, stop))
        scales, zeros = (one.repeat_interleave(inputs // groups, 1) for one in shared)
        return (_codes(matrix, contents, start, stop)[:, :inputs].float() - zeros) * scales

    return Derived("F32", (outputs, inputs), coded)


def _check_class(matrix: _Matrix, checkpoint: Checkpoint, known: Sequence[str]) -> None:
    if matrix.kind not in known:
        raise ModelLoadError(
            f"{checkpoint.places[matrix.part('qdata')].path}: {matrix.name} is of torchao's class {matrix.kind}, and "
            "config.json's quant_type makes another: give there how the weights were quantized"
        )


def _sizes(matrix: _Matrix, checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Outputs, inputs and groups of one in 4 bits."""
    numbers, wrong = checkpoint.shape(matrix.part("qdata"), matrix.layer), _misfit(matrix, checkpoint)
    size, group = matrix.said.get("shape"), matrix.said.get("block_size")
    if not (_is_pair(size) and _is_pair(group)):
        raise wrong
    (outputs, inputs), (rows, together) = size, group
    if rows != 1 or inputs % together or inputs % 8:
        raise wrong
    groups = inputs // together
    if checkpoint.places[matrix.part("qdata")].dtype(matrix.part("qdata")) not in _TYPES[matrix.kind]:
        raise wrong
    if matrix.kind == _PLAIN:
        shared = [checkpoint.shape(matrix.part(kind), matrix.layer) for kind in ("scale", "zero_point")]
        if numbers != (outputs, inputs // 2) or shared != [(groups, outputs)] * 2:
            raise wrong
        return outputs, inputs, groups
    shape = checkpoint.shape(matrix.part("scale_and_zero"), matrix.layer)
    if len(numbers) != 4 or numbers[2] != _LANES or len(shape) != 3 or shape[2] != 2:
        raise wrong
    padded = numbers[0] * _TILE_ROWS, numbers[1] * numbers[3] * 2 * _TILE_INPUTS
    if padded[0] < outputs or padded[1] < inputs or shape[:2] != (padded[1] // together, padded[0]):
        raise wrong
    return outputs, inputs, groups


def _is_pair(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def _misfit(matrix: _Matrix, checkpoint: Checkpoint) -> ModelLoadError:
    shapes = ", ".join(
        f"{part} {list(checkpoint.shape(matrix.part(part), matrix.layer))}" for part in sorted(matrix.parts)
    )
    said = ", ".join(f"{name} {str(matrix.said.get(name))[:40]}" for name in ("shape", "block_size"))
    path = checkpoint.places[matrix.part("qdata")].path
    return ModelLoadError(
        f"{path}: the tensors of {matrix.name} do not fit each other ({shapes}; its metadata: {said}): download the "
        "checkpoint again"
    )


def _codes(matrix: _Matrix, contents: Contents, start: int, stop: int) -> Tensor:
    """uint8 [O, I] from 0 to 15 of these rows; in tiles I is rounded up."""
    numbers = matrix.part("qdata")
    if matrix.kind == _PLAIN:
        in_bytes = contents.rows(numbers, start, stop).view(torch.uint8)
        return torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(1) ^ _MIDDLE  # around zero there
    first = start // _TILE_ROWS
    words = contents.rows(numbers, first, -(-stop // _TILE_ROWS))
    in_bytes = words.view(torch.uint8).view(*words.shape, 4)
    halves = torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(-2)[..., _PLACES]
    tiles, across, lanes, in_lane = words.shape
    apart = halves.view(tiles, across, _TILE_ROWS, lanes // _TILE_ROWS, in_lane, 2, 2, 2)
    rows = apart.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(tiles * _TILE_ROWS, -1)
    return rows[start - first * _TILE_ROWS : stop - first * _TILE_ROWS]


def _shared(matrix: _Matrix, contents: Contents, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """float32 scales and zero points [O, G] of these rows; in tiles G is rounded up."""
    if matrix.kind == _PLAIN:
        scales, zeros = (
            contents.whole(matrix.part(kind))[:, start:stop].t().float() for kind in ("scale", "zero_point")
        )
    else:
        both = contents.whole(matrix.part("scale_and_zero"))[:, start:stop].float()
        scales, zeros = both[..., 0].t(), both[..., 1].t()
    return scales, _MIDDLE - zeros / scales
