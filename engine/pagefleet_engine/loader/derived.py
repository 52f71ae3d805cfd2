"""Tensors that are worked out of others of the checkpoint while they are read, some rows at a time.

Files that lay numbers out in a way of their own become sources of what slots take, with nothing held in memory.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import STORED_AS, StoredForm, TensorSource, plain_form
from pagefleet_engine.loader.readers import Readable, read_into

_NUMBER_BYTES = 4
_KEPT = 8
"""Tensors that are read whole, and wanted again for the next rows."""


class Contents:
    """Reads tensors of a checkpoint whose files are open; several threads may."""

    def __init__(self, places: Mapping[str, TensorSource], opened: Mapping[int, Readable]) -> None:
        self._places, self._opened = places, opened
        self._whole = lru_cache(_KEPT)(self._read_whole)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Those from `start` to before `stop`.

        Raises:
            ModelLoadError: the file cannot be read.
        """
        file = self._places[name]
        shape, stored = file.shape(name), file.form(name).numbers
        assert isinstance(stored, torch.dtype), "a file in safetensors has numbers of a type"
        rows = torch.empty((stop - start, *shape[1:]), dtype=stored)
        row_bytes = math.prod(shape[1:]) * stored.itemsize
        try:
            read_into(self._opened[id(file)], file.offset(name) + start * row_bytes, rows)
        except (OSError, EOFError) as error:
            raise ModelLoadError(f"{file.path}: {name} cannot be read ({error}): download it again") from error
        return rows

    def whole(self, name: str) -> Tensor:
        """All of it; not to be written into."""
        return self._whole(name)

    def _read_whole(self, name: str) -> Tensor:
        shape = self._places[name].shape(name)
        return self.rows(name, 0, shape[0] if shape else 1).view(shape)


class Checkpoint:
    """All files of one, by what is in them."""

    def __init__(self, files: Sequence[TensorSource]) -> None:
        self.files = files
        self.places = {name: file for file in files for name in file.names}
        """Which file has a tensor."""

    def shape(self, name: str, layer: str) -> tuple[int, ...]:
        """Of a tensor that belongs to the layer.

        Raises:
            ModelLoadError: there is none, or one of a type that is not read.
        """
        if name not in self.places:
            raise ModelLoadError(
                f"{self.files[0].path}: {layer} is quantized, and {name} is missing: download the checkpoint again"
            )
        file = self.places[name]
        if file.dtype(name) not in STORED_AS:
            raise ModelLoadError(f"{file.path}: {name} is of type {file.dtype(name)}: download the checkpoint again")
        return file.shape(name)

    @contextmanager
    def opened(self) -> Iterator[Contents]:
        """What is in it, for as long as the context lasts."""
        with ExitStack() as stack:
            yield Contents(self.places, {id(file): stack.enter_context(file.opened()) for file in self.files})


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that no file has, of numbers of 32 bits."""

    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    rows: Callable[[Contents, int, int], Tensor]
    """Its rows, from one to before another, of that type."""


def in_memory(values: Tensor) -> Derived:
    """Of float32 that is known already."""
    return Derived("F32", tuple(values.shape), lambda _, start, stop: values[start:stop])


class RenamedFile:
    """A file of which some tensors have other names or shapes, and others are hidden; a `TensorSource`."""

    def __init__(
        self, file: TensorSource, names: Mapping[str, str], codes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """`names`: ours, and the file's. `codes`: what is bytes in these shapes, of whatever type the file has it."""
        self._file, self._theirs, self._codes = file, names, codes or {}
        self.path, self.names, self.metadata = file.path, list(names), file.metadata

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._codes.get(name) or self._file.shape(self._theirs[name])

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return "U8" if name in self._codes else self._file.dtype(self._theirs[name])

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        return plain_form("U8") if name in self._codes else self._file.form(self._theirs[name])

    def offset(self, name: str) -> int:
        """See TensorSource."""
        return self._file.offset(self._theirs[name])

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """See TensorSource."""
        with self._file.opened() as readable:
            yield readable


class DerivedTensors:
    """A `TensorSource` of what is worked out, as if these tensors lay one after another."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, Derived]) -> None:
        self._checkpoint, self._tensors = checkpoint, tensors
        self.path: Path = checkpoint.files[0].path
        self.names = list(tensors)
        self.metadata: Mapping[str, str] = {}
        sizes = [_NUMBER_BYTES * math.prod(tensor.shape) for tensor in tensors.values()]
        self._starts = list(accumulate(sizes, initial=0))
        self._offsets = dict(zip(self.names, self._starts, strict=False))

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return self._tensors[name].dtype

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        return plain_form(self.dtype(name))

    def offset(self, name: str) -> int:
        """See TensorSource."""
        return self._offsets[name]

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """See TensorSource."""
        with self._checkpoint.opened() as contents:
            yield _Pieces(self, contents)

    def fill(self, view: memoryview, offset: int, contents: Contents) -> None:
        """Work out the bytes from `offset` on into all of `view`, which ends within the same tensor."""
        at = bisect.bisect_right(self._starts, offset) - 1
        tensor, begin = self._tensors[self.names[at]], offset - self._starts[at]
        row_bytes = _NUMBER_BYTES * math.prod(tensor.shape[1:])
        start, stop = begin // row_bytes, -(-(begin + len(view)) // row_bytes)
        made = tensor.rows(contents, start, stop).contiguous().view(-1).view(torch.uint8)
        first = begin - start * row_bytes
        view[:] = made[first : first + len(view)].numpy().data


class _Pieces:
    """Their bytes; `Pieces`."""

    def __init__(self, tensors: DerivedTensors, contents: Contents) -> None:
        self._tensors, self._contents = tensors, contents

    def fill(self, view: memoryview, offset: int) -> None:
        """See Pieces."""
        self._tensors.fill(view, offset, self._contents)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """int32 words of the numbers uint8 [O, I], lowest bits first, as `packing.unpack` takes them; of 4 or 8 bits."""
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int32)
