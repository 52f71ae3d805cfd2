"""Checkpoints of bitsandbytes as tensors that a model has slots for.

Beside a layer's weight such a file has what belongs to it:

    4 bits   weight [O * I / 2, 1]   weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 (JSON), and where the
                                     scales are quantized too .nested_absmax, .nested_quant_map
    8 bits   weight [O, I]           SCB [O], weight_format

From these come `weight` [O, I / 2] with `weight_absmax` [O, I / 64], and `weight_scale` [O]: values = numbers * scales.
Source: transformers' and bitsandbytes' serialisation (Dettmers et al., arXiv 2305.14314 and 2208.07339).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.coded import TABLES
from pagefleet_engine.loader.checkpoint import StoredForm, TensorSource, plain_form
from pagefleet_engine.loader.readers import Readable, read_into

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_ROW_SCALES, _FORMAT = ".SCB", ".weight_format"
_LARGEST_INT8 = 127.0
_SCALES_OF = 64
"""Numbers that share a scale."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}


def settled(files: Sequence[TensorSource]) -> Sequence[TensorSource]:
    """The same files, or of bitsandbytes' with scales worked out.

    Raises:
        ModelLoadError: they hold what no slot takes, or a file cannot be read.
    """
    names = {name: file for file in files for name in file.names}
    states = {name.partition(_STATE)[0]: name for name in names if _STATE in name}
    states = {weight: state for weight, state in states.items() if weight in names}
    rows = [name for name in names if name.endswith(_ROW_SCALES)]
    if not states and not rows:
        return files
    shapes: dict[str, tuple[int, ...]] = {}
    made: dict[str, Tensor] = {}
    for weight, state in states.items():
        said = _state_of(names[state], state)
        shapes[weight] = _shape_of(said, names[weight], weight)
        parts = {part: _read(names[weight + part], weight + part) for part in _PARTS if weight + part in names}
        made[f"{weight}_absmax"] = _scales(said, parts, state).view(shapes[weight][0], -1)
    for name in rows:
        made[f"{name.removesuffix(_ROW_SCALES)}.weight_scale"] = _read(names[name], name) / _LARGEST_INT8
    for name, file in names.items():
        if name.endswith(_FORMAT) and bool(_read(file, name).any()):
            raise ModelLoadError(
                f"{file.path}: {name} says that the weight is stored in tiles: save the model again with a newer "
                "bitsandbytes, as it was loaded"
            )
    hidden = {name for name in names if _STATE in name or name.endswith((*_PARTS, _ROW_SCALES, _FORMAT))}
    return [*(_Settled(file, hidden, shapes) for file in files), _Made(files[0].path, made)]


def _state_of(file: TensorSource, name: str) -> dict[str, Any]:
    try:
        said = json.loads(bytes(_read(file, name).tolist()))
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{file.path}: {name} is no JSON ({error}): download the checkpoint again") from error
    if not isinstance(said, dict):
        raise ModelLoadError(f"{file.path}: {name} is no JSON object: download the checkpoint again")
    return said


def _shape_of(said: dict[str, Any], file: TensorSource, weight: str) -> tuple[int, int]:
    shape, block = said.get("shape"), said.get("blocksize")
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in shape)):
        raise ModelLoadError(f"{file.path}: {weight} has shape {shape} in its quant_state: download it again")
    outputs, inputs = shape
    if block != _SCALES_OF or inputs % _SCALES_OF:
        raise ModelLoadError(
            f"{file.path}: {weight} has {inputs} inputs and scales for {block} numbers: whole rows of {_SCALES_OF} are "
            "run; give another checkpoint"
        )
    stored = math.prod(file.shape(weight)) * torch.empty(0, dtype=_DTYPES.get(file.dtype(weight))).itemsize
    if stored != outputs * inputs // 2:
        raise ModelLoadError(
            f"{file.path}: {weight} holds {stored} bytes, and {outputs} x {inputs} numbers of 4 bits are "
            f"{outputs * inputs // 2}: download the checkpoint again"
        )
    return outputs, inputs // 2


def _scales(said: dict[str, Any], parts: dict[str, Tensor], state: str) -> Tensor:
    table, scales = TABLES.get(str(said.get("quant_type")), ()), parts.get(".absmax")
    stored = parts.get(".quant_map")
    if stored is None or not torch.allclose(stored.float(), torch.tensor(table or 0.0), atol=1e-3):
        raise ModelLoadError(f"{state}: a table of its own (quant_map) is not run: give a checkpoint in nf4 or fp4")
    if scales is None:
        raise ModelLoadError(f"{state}: its scales (absmax) are missing: download the checkpoint again")
    if scales.dtype == torch.uint8:
        nested, values = parts.get(".nested_absmax"), parts.get(".nested_quant_map")
        size, offset = said.get("nested_blocksize"), said.get("nested_offset")
        if nested is None or values is None or not isinstance(size, int) or not isinstance(offset, float):
            raise ModelLoadError(f"{state}: scales of its scales (nested_absmax) are missing: download it again")
        if values.numel() <= int(scales.max()) or nested.numel() * size < len(scales):
            raise ModelLoadError(f"{state}: scales of its scales (nested_absmax) are too few: download it again")
        scales = values[scales.int()] * nested.repeat_interleave(size)[: len(scales)] + offset
    wanted = math.prod(said["shape"]) // _SCALES_OF
    if scales.numel() != wanted:
        raise ModelLoadError(f"{state}: {scales.numel()} scales, {wanted} belong to its numbers: download it again")
    return scales.float()


def _read(file: TensorSource, name: str) -> Tensor:
    dtype = _DTYPES.get(file.dtype(name))
    if dtype is None:
        raise ModelLoadError(f"{file.path}: {name} is of type {file.dtype(name)}: download the checkpoint again")
    tensor = torch.empty(math.prod(file.shape(name)), dtype=dtype)
    try:
        with file.opened() as readable:
            read_into(readable, file.offset(name), tensor)
    except (OSError, EOFError) as error:
        raise ModelLoadError(f"{file.path}: {name} cannot be read ({error}): download it again") from error
    return tensor


class _Settled:
    """A file without what is worked out, and with the shapes of its weights; a `TensorSource`."""

    def __init__(self, file: TensorSource, hidden: set[str], shapes: dict[str, tuple[int, ...]]) -> None:
        self._file, self._shapes, self.path = file, shapes, file.path
        self.names = [name for name in file.names if name not in hidden]
        self.metadata = file.metadata

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._shapes.get(name) or self._file.shape(name)

    def dtype(self, name: str) -> str:
        """See TensorSource; codes may lie in floats, two or four of them in one."""
        return "U8" if name in self._shapes else self._file.dtype(name)

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        return plain_form("U8") if name in self._shapes else self._file.form(name)

    def offset(self, name: str) -> int:
        """See TensorSource."""
        return self._file.offset(name)

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """See TensorSource."""
        with self._file.opened() as readable:
            yield readable


class _Made:
    """Tensors of float32 in memory, one after another; a `TensorSource`, and its own `Pieces`."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.path, self.names = path, list(tensors)
        self.metadata: Mapping[str, str] = {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = [4 * tensor.numel() for tensor in tensors.values()]
        self._starts = dict(zip(self.names, itertools.accumulate(sizes, initial=0), strict=False))
        whole = torch.cat([tensors.pop(name).flatten() for name in self.names])
        self._bytes = whole.view(torch.uint8).numpy().data

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return "F32" if name in self._starts else ""

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        return plain_form(self.dtype(name))

    def offset(self, name: str) -> int:
        """See TensorSource."""
        return self._starts[name]

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """See TensorSource."""
        yield self

    def fill(self, view: memoryview, offset: int) -> None:
        """See Pieces."""
        view[:] = self._bytes[offset : offset + len(view)]
