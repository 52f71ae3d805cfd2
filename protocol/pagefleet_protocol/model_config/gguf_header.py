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
from typing import Any, NamedTuple

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_types import KINDS, OTHER_KINDS, GgufKind

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 16
_MOST_TEXT_BYTES = 32 << 20
"""Of a whole header, as the next: the largest vocabularies with their merges take a tenth."""
_MOST_VALUES = 1 << 22
"""Texts, and numbers in arrays."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
_NUMBERS: Mapping[int, Any] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NOT_A_MODEL = re.compile(r"mmproj[^/]*$|(^|[-._/])imatrix\.gguf$", re.IGNORECASE)


class HeaderTensor(NamedTuple):
    """Where a tensor lies."""

    shape: tuple[int, ...]
    """Rows first."""
    number: int
    """Of its kind."""
    start: int
    """In the file."""

    @property
    def type(self) -> GgufKind:
        """Its kind."""
        return KINDS[self.number]

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) // self.type.numbers * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the headers of a model's files say."""

    source: str
    """For messages: the first file."""
    metadata: Mapping[str, Any]
    """Numbers, flags and texts; arrays as lists of texts or as views of numbers."""
    tensors: Mapping[str, HeaderTensor]
    """In the order of the file."""


class MoreNeeded(Exception):
    """The header goes on beyond the bytes that were given, up to `stop` at least."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


def parts_named(name: str) -> list[str] | None:
    """The names of all parts of a model, of the name of one of them; None: it is in one file."""
    named = _PART.fullmatch(name)
    if named is None:
        return None
    return [f"{named[1]}-{part:05}-of-{named[3]}.gguf" for part in range(1, int(named[3]) + 1)]


def first_part(name: str) -> str:
    """The name of a model's first part, of the name or path of one of them; itself where it is in one file."""
    named = _PART.fullmatch(name)
    return name if named is None else f"{named[1]}-00001-of-{named[3]}.gguf"


def is_beside_a_model(name: str) -> bool:
    """Whether a GGUF file of this name or path is no model: a projection of pictures, or what quantizing weighed by."""
    return _NOT_A_MODEL.search(name) is not None


def parse_gguf(data: bytes | mmap.mmap, size: int, source: str) -> GgufHeader:
    """Read the header of a file of `size` bytes, of which `data` are the first; `source` names it in errors.

    Raises:
        ModelConfigError: it is damaged, or holds a type that is not read.
        MoreNeeded: the header is longer than `data`.
    """
    try:
        metadata, tensors = _Header(source, data, size).read()
    except _DamagedError as error:
        raise ModelConfigError(f"{source} is truncated or no sound GGUF file ({error}): download it again") from None
    return GgufHeader(source, metadata, tensors)


class _DamagedError(Exception):
    """What is wrong with a file."""


class _Header:
    """Walks over a header; what lies beyond the file is never asked for."""

    def __init__(self, source: str, data: bytes | mmap.mmap, size: int) -> None:
        self._source, self._data, self._at, self._size = source, data, 0, size
        self._values_left, self._text_bytes_left = _MOST_VALUES, _MOST_TEXT_BYTES

    def read(self) -> tuple[dict[str, Any], dict[str, HeaderTensor]]:
        if not self._size:
            raise _DamagedError("it is empty")
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise _DamagedError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            said = f"version {swapped} of another byte order" if swapped in _VERSIONS else f"version {version}"
            raise ModelConfigError(
                f"{self._source} is GGUF {said}; versions 2 and 3, little-endian, are read: convert it anew"
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

    def _tensors(self, count: int, alignment: Any) -> dict[str, HeaderTensor]:
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise _DamagedError(f"general.alignment is {alignment!r:.40}")
        said = [self._tensor() for _ in range(count)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, HeaderTensor] = {}
        end = begin
        for name, shape, number, offset in sorted(said, key=lambda one: one[3]):
            start = begin + offset
            if name in tensors:
                raise _DamagedError(f"the tensor {name[:80]!a} is there twice")
            if offset % alignment or start < end:
                raise _DamagedError(f"{name[:80]!a} begins at {start}, within another tensor or off the alignment")
            tensors[name] = HeaderTensor(shape, number, start)
            end = start + tensors[name].num_bytes
            if end > self._size:
                raise _DamagedError(f"{name[:80]!a} ends at byte {end} of {self._size}")
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._text(), self._number("<I")
        if not 0 < num_dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"{name[:80]!a} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        if number in OTHER_KINDS:
            raise ModelConfigError(
                f"{self._source}: {name[:80]!a} is of type {OTHER_KINDS[number]}, which is not read; give a file in "
                f"{', '.join(kind.name for kind in KINDS.values())}"
            )
        kind = KINDS.get(number)
        if kind is None:
            raise _DamagedError(f"{name[:80]!a} is of the unknown type {number}")
        if not all(0 < size <= self._size * kind.numbers for size in shape) or shape[-1] % kind.numbers:
            raise _DamagedError(f"{name[:80]!a} is {list(shape)} in {kind.name}")
        return name, shape, number, offset

    def _value(self, kind: int, *, nested: bool = False) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY and not nested:
            return self._array()
        if kind not in _NUMBERS:
            raise _DamagedError(f"a value of type {kind}")
        return self._array_of(kind, 1)[0]

    def _array(self) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if count > self._values_left:
            raise _DamagedError(f"an array of {count} values, in all over {_MOST_VALUES}")
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise _DamagedError(f"an array of type {kind}")
        self._values_left -= count
        return self._array_of(kind, count)

    def _array_of(self, kind: int, count: int) -> memoryview[Any]:
        form = _NUMBERS[kind]
        found: memoryview[Any] = memoryview(self._bytes(count * struct.calcsize(f"={form}"))).cast(form)
        return found

    def _text(self) -> str:
        length = self._number("<Q")
        self._values_left -= 1
        if length > self._text_bytes_left or self._values_left < 0:
            raise _DamagedError(f"a text of {length} bytes; texts come to over {_MOST_TEXT_BYTES}, or are too many")
        self._text_bytes_left -= length
        return self._bytes(length).decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        value: int = struct.unpack(form, self._bytes(size))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        if self._at + count > self._size:
            raise _DamagedError(f"its header ends at byte {self._at + count} of {self._size}")
        if self._at + count > len(self._data):
            raise MoreNeeded(self._at + count)
        found = self._data[self._at : self._at + count]
        self._at += count
        return found
