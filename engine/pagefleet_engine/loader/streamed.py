"""Safetensors files that are read where they lie, as the loader sees them: headers first, then pieces of tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pagefleet_download.errors import DownloadError, StoreUnreachable
from pagefleet_download.source import RemoteFile
from pagefleet_download.tensor_bytes import LENGTH_BYTES, header_bytes
from pagefleet_download.weight_stream import WeightStream

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import StoredForm, plain_form

_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Of a number, by safetensors' names of types."""


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """In the file."""


class StreamedFile:
    """One file of a stream, as a `TensorSource`; `fill` is called by several threads at once."""

    def __init__(self, stream: WeightStream, file: RemoteFile) -> None:
        """Reads the header.

        Raises:
            ModelLoadError: the file is damaged.
            DownloadError: it cannot be read.
        """
        self._stream = stream
        self._file = file
        self.path = Path(file.name)
        """See TensorSource."""
        try:
            self._entries, self.metadata = read_header(self._read, file.size)
        except ValueError as error:
            raise ModelLoadError(f"{file.name}: {error}") from error
        self.names = list(self._entries)
        """See TensorSource."""

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return self._entries[name].dtype

    def form(self, name: str) -> StoredForm:
        """See TensorSource."""
        return plain_form(self.dtype(name))

    def offset(self, name: str) -> int:
        """See TensorSource."""
        return self._entries[name].start

    @contextmanager
    def opened(self) -> Iterator[StreamedFile]:
        """See TensorSource: as long as the stream is open, the file is."""
        yield self

    def fill(self, view: memoryview, offset: int) -> None:
        """Read the bytes from `offset` on into all of `view`.

        Raises:
            OSError: they cannot be had.
        """
        try:
            view[:] = self._read(offset, offset + len(view))
        except DownloadError as error:
            raise OSError(str(error)) from error

    def _read(self, start: int, stop: int) -> bytes:
        return self._stream.read(self._file, start, stop)


@contextmanager
def streamed_files(folder: Path) -> Iterator[list[StreamedFile]]:
    """Open the weights of a model whose folder says where they are; headers have been read.

    Raises:
        ModelLoadError: they cannot be read, or are damaged.
    """
    try:
        with WeightStream(folder, os.environ) as stream:
            yield [StreamedFile(stream, file) for file in stream.files]
    except StoreUnreachable as error:
        raise ModelLoadError(f"{error}: check the address, network and proxy (HTTPS_PROXY), and start again") from error
    except DownloadError as error:
        raise ModelLoadError(str(error)) from error


def read_header(read: Callable[[int, int], bytes], size: int) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Return the tensors of a safetensors file of `size` bytes in their order, and what its header says besides; checks
    what the library would.

    Args:
        read: returns bytes from one offset up to another.
        size: of the file.

    Raises:
        ValueError: the header lies; the message goes on with what to do.
    """
    told = f"({size} bytes) is truncated or not a safetensors file: upload it again"
    length = header_bytes(read(0, min(LENGTH_BYTES, size)) if size else b"", size)
    if length is None:
        raise ValueError(told)
    begin = LENGTH_BYTES + length
    try:
        header = json.loads(read(LENGTH_BYTES, begin))
        metadata = {str(name): str(value) for name, value in (header.pop("__metadata__", None) or {}).items()}
        found = {name: _entry(value, begin) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(told) from None
    ordered = sorted(found.items(), key=lambda item: (item[1][0].start, item[1][1]))
    at = begin
    for _, (entry, stop) in ordered:
        if entry.start != at or stop < at:
            raise ValueError(told)
        at = stop
    if at != size:
        raise ValueError(told)
    return {name: entry for name, (entry, _) in ordered}, metadata


def _entry(value: Mapping[str, Any], begin: int) -> tuple[Entry, int]:
    """A tensor, and where it ends in the file."""
    shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("no sizes")
    if _BITS[value["dtype"]] * math.prod(shape) != 8 * (stop - start):
        raise ValueError("another length")
    return Entry(value["dtype"], shape, begin + start), begin + stop
