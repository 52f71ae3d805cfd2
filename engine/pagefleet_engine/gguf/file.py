"""The header of a GGUF file, versions 2 and 3: metadata, and where each tensor lies. Nothing in it is believed unseen.

    magic, version, number of tensors, number of entries
    entries: name, type, value        arrays: type, length, values        texts: length, UTF-8
    tensors: name, number of dimensions, dimensions (columns first), type, offset from where the data begin
    data, from the next multiple of `general.alignment` on

Source: ggml's docs/gguf.md. Lengths are checked against the file before anything is made of them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.blocks import BLOCK_TYPES, OTHER_TYPES, BlockType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_TEXT_BYTES = 16 << 20
_MOST_VALUES = 1 << 24
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    shape: tuple[int, ...]
    """Rows first."""
    type: BlockType
    start: int
    """In the file."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the headers of a model's files say."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Numbers, flags and texts; arrays as lists of texts or as numpy arrays."""
    tensors: Mapping[str, GgufTensor]
    """In the order of the files."""


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a file, and of the other parts where it is the first.

    Raises:
        ModelLoadError: a file is missing or damaged, or holds a type that is not read.
    """
    files = _parts_of(path)
    metadata, tensors = _read_header(files[0])
    count = metadata.get("split.count", 1)
    if len(files) > 1 and count != len(files):
        raise ModelLoadError(f"{path} says that it has {count} parts, and its name {len(files)}: download it again")
    for file in files[1:]:
        _, more = _read_header(file)
        if doubled := sorted(more.keys() & tensors.keys()):
            raise ModelLoadError(f"{file} holds {doubled[0]}, and so does another part: download all parts again")
        tensors |= more
    said = metadata.get("split.tensors.count", len(tensors))
    if said != len(tensors):
        raise ModelLoadError(f"{path} has {len(tensors)} tensors in its parts, and says {said}: download it again")
    return GgufModel(files, metadata, tensors)


def _parts_of(path: Path) -> tuple[Path, ...]:
    named = _PART.fullmatch(path.name)
    if named is None:
        return (path,)
    count = int(named[3])
    parts = tuple(path.with_name(f"{named[1]}-{part:05}-of-{named[3]}.gguf") for part in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise ModelLoadError(
            f"{path.parent} lacks {', '.join(missing[:3]) or path.name}: download all parts of the model"
        )
    return parts


class _DamagedError(Exception):
    """What is wrong with a file."""


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise _DamagedError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}): give a GGUF file") from None
    except _DamagedError as error:
        raise ModelLoadError(f"{path} is truncated or no sound GGUF file ({error}): download it again") from None


class _Header:
    """Walks over a header; what lies beyond the file is never asked for."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._size = path, data, 0, len(data)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise _DamagedError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            said = f"version {swapped} of another byte order" if swapped in _VERSIONS else f"version {version}"
            raise ModelLoadError(
                f"{self._path} is GGUF {said}; versions 2 and 3, little-endian, are read: convert it anew"
            )
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        if num_tensors > _MOST_TENSORS or num_entries > _MOST_ENTRIES:
            raise _DamagedError(f"{num_tensors} tensors and {num_entries} entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            if key in metadata:
                raise _DamagedError(f"{key[:80]!a} is there twice")
            metadata[key] = self._value(self._number("<I"))
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", _ALIGNMENT))

    def _tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise _DamagedError(f"general.alignment is {alignment!r:.40}")
        said = [self._tensor() for _ in range(count)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = begin
        for name, shape, kind, offset in sorted(said, key=lambda one: one[3]):
            start = begin + offset
            if name in tensors:
                raise _DamagedError(f"the tensor {name[:80]!a} is there twice")
            if offset % alignment or start < end:
                raise _DamagedError(f"{name[:80]!a} begins at {start}, within another tensor or off the alignment")
            end = start + math.prod(shape) // kind.numbers * kind.num_bytes
            if end > self._size:
                raise _DamagedError(f"{name[:80]!a} ends at byte {end} of {self._size}")
            tensors[name] = GgufTensor(self._path, shape, kind, start)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, num_dimensions = self._text(), self._number("<I")
        if not 0 < num_dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"{name[:80]!a} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        if number in OTHER_TYPES:
            raise ModelLoadError(
                f"{self._path}: {name[:80]} is of type {OTHER_TYPES[number]}, which is not read; give a file in "
                f"{', '.join(kind.name for kind in BLOCK_TYPES.values())}"
            )
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            raise _DamagedError(f"{name[:80]!a} is of the unknown type {number}")
        if not all(0 < size <= self._size * kind.numbers for size in shape) or shape[-1] % kind.numbers:
            raise _DamagedError(f"{name[:80]!a} is {list(shape)} in {kind.name}")
        return name, shape, kind, offset

    def _value(self, kind: int, *, nested: bool = False) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY and not nested:
            return self._array()
        if kind not in _NUMBERS:
            raise _DamagedError(f"a value of type {kind}")
        return self._array_of(kind, 1)[0].item()

    def _array(self) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if count > _MOST_VALUES:
            raise _DamagedError(f"an array of {count} values")
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise _DamagedError(f"an array of type {kind}")
        return self._array_of(kind, count)

    def _array_of(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        length = self._number("<Q")
        if length > _MOST_TEXT_BYTES:
            raise _DamagedError(f"a text of {length} bytes")
        return self._bytes(length).decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        value: int = struct.unpack(form, self._bytes(size))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        if self._at + count > self._size:
            raise _DamagedError(f"its header ends at byte {self._at + count} of {self._size}")
        found = self._data[self._at : self._at + count]
        self._at += count
        return found
