"""GGUF files as sources of tensors, under the names that a checkpoint in safetensors has for them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pagefleet_kernels.native.library import Library
from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_config import head_dim, is_tied, model_kind, num_stacked
from pagefleet_protocol.model_config.gguf_names import OurTensor, our_tensors
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.blocks import BY_NAME, BlockType
from pagefleet_engine.gguf.file import GgufTensor, read_gguf
from pagefleet_engine.gguf.folder import gguf_at
from pagefleet_engine.loader.checkpoint import StoredForm
from pagefleet_engine.loader.readers import Encoding, Stored

ENCODED = tuple(name for name, kind in BY_NAME.items() if kind.plain is None)
"""Names of the types that are decoded as they are read."""


class _Held(NamedTuple):
    """One of our tensors in a file."""

    tensor: GgufTensor
    """All of what the file has in one."""
    ours: OurTensor


class GgufSource:
    """One file; a `TensorSource`."""

    def __init__(
        self, path: Path, held: dict[str, _Held], head_dim: int, raw: Collection[str], native: Library | None
    ) -> None:
        self.path = path
        """See TensorSource."""
        self._held = held
        self.names = list(held)
        """See TensorSource."""
        self.metadata: Mapping[str, str] = {}
        """See TensorSource."""
        self._head_dim, self._raw, self._native = head_dim, raw, native

    @contextmanager
    def opened(self) -> Iterator[int]:
        """See TensorSource."""
        with self.path.open("rb") as file:
            yield file.fileno()

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        tensor, ours = self._held[name]
        shape = tensor.shape if ours.expert is None else tensor.shape[1:]
        if len(shape) > 2:  # a matrix of rows that the file has by heads
            shape = (math.prod(shape[:-1]), shape[-1])
        if ours.is_row and len(shape) == 1:
            shape = (1, *shape)
        if name not in self._raw:
            return shape
        return (*shape[:-1], shape[-1] // tensor.type.numbers * tensor.type.num_bytes)

    def dtype(self, name: str) -> str:
        """See TensorSource; or GGUF's name of a type in blocks."""
        return "U8" if name in self._raw else self._held[name].tensor.type.name

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        tensor, ours = self._held[name]
        stored = torch.uint8 if name in self._raw else _stored(BY_NAME[tensor.type.name], ours.unit_more, self._native)
        return StoredForm(stored, self._head_dim if ours.in_turns else None)

    def offset(self, name: str) -> int:
        """See TensorSource."""
        tensor, ours = self._held[name]
        before = (ours.expert or 0) * math.prod(tensor.shape[1:])
        return tensor.start + before // tensor.type.numbers * tensor.type.num_bytes


def gguf_sources(folder: Path, raw: Collection[str] = (), native: Library | None = None) -> list[GgufSource]:
    """The GGUF files of a model's folder; none where it has other weights.

    `raw`: our names of tensors whose bytes are wanted as they are. `native`: who decodes the others' blocks in this
    machine's memory; None: torch does.

    Raises:
        ModelLoadError: a file is damaged, or holds what no model of its kind has.
    """
    first = gguf_at(folder)
    if first is None:
        return []
    model = read_gguf(Path(os.readlink(first)) if first.is_symlink() else first)
    try:
        kind, own_head_dim, stacked = model_kind(model), head_dim(model), num_stacked(model)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
    held: dict[Path, dict[str, _Held]] = {path: {} for path in model.files}
    for name, tensor in model.tensors.items():
        ours = our_tensors(kind, name, stacked, tied=is_tied(model))
        if ours is None:
            raise ModelLoadError(
                f"{tensor.path}: no place in a model of the kind {kind} for {name[:80]!a}: give another file"
            )
        if any(one.in_turns for one in ours) and tensor.shape[0] % own_head_dim:
            raise ModelLoadError(
                f"{tensor.path}: {name[:80]!a} has {tensor.shape[0]} rows, heads have {own_head_dim}: convert anew"
            )
        held[tensor.path] |= {one.name: _Held(tensor, one) for one in ours}
    return [GgufSource(path, tensors, own_head_dim, raw, native) for path, tensors in held.items() if tensors]


def _stored(kind: BlockType, less_one: bool, native: Library | None) -> Stored:
    if kind.plain is not None and not less_one:
        return kind.plain
    return Encoding(kind.numbers, kind.num_bytes, partial(_decode, kind, less_one, native))


def _decode(kind: BlockType, less_one: bool, native: Library | None, blocks: Tensor, room: Tensor) -> None:
    if less_one:
        room.copy_(kind.decode(blocks).sub_(1.0).view(room.shape))
    else:
        kind.decode_into(room, blocks, native)
