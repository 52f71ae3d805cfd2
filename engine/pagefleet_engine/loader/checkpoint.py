"""Which safetensors files make up a checkpoint, and which tensor is in which. Reads headers only.

A damaged, incomplete or foreign checkpoint becomes one line that names the file and the remedy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from pagefleet_download.tensor_bytes import LENGTH_BYTES, header_bytes

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.readers import Readable, Stored
from pagefleet_engine.models.config_file import read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MOST_SHOWN = 160
"""Characters of a name."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
STORED_AS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""By safetensors' names the types that we read."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Of a number, by the names of all types."""


def checkpoint_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The files to read, each with the tensors it must hold (None: whatever it holds)."""
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    if loose := sorted(folder.glob("*.safetensors")):
        if any("-of-" in path.name for path in loose):
            raise ModelLoadError(f"{folder / _INDEX} is missing beside sharded weights: download it too")
        return dict.fromkeys(loose)
    raise ModelLoadError(_no_weights(folder))


class StoredForm(NamedTuple):
    """How a tensor's numbers lie in its file."""

    numbers: Stored
    head_dim: int | None = None
    """Rows of each head take turns, of its first half and its second; None: they are in order."""


def plain_form(dtype: str) -> StoredForm:
    """Of numbers of a type that safetensors calls so, and that is read."""
    return StoredForm(STORED_AS[dtype])


class TensorSource(Protocol):
    """One safetensors file, wherever it is: what its header says, and the way to its numbers."""

    path: Path
    """For messages; of a file of another place its name."""
    names: list[str]
    """Tensors in the order in which they lie in the file."""
    metadata: Mapping[str, str]
    """What the header says besides."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header, as the next two."""
        ...

    def dtype(self, name: str) -> str:
        """As safetensors spells it, e.g. BF16."""
        ...

    def form(self, name: str) -> StoredForm:
        """Of a tensor whose type is read."""
        ...

    def offset(self, name: str) -> int:
        """Of the tensor's first byte in the file."""
        ...

    def opened(self) -> AbstractContextManager[Readable]:
        """What a reader takes, for as long as the context lasts."""
        ...


class SafetensorsHeader:
    """What a file's header says, checked as the library does: all of a `TensorSource` but the way to its numbers."""

    def __init__(self, path: Path, size: int, read: Callable[[int, int], bytes], remedy: str) -> None:
        """`read`: returns bytes of the file, of `size`, from one offset up to another. `remedy`: for messages.

        Raises:
            ModelLoadError: the header lies.
        """
        self.path = path
        """See TensorSource."""
        try:
            self._entries, self.metadata = _read_header(read, size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ModelLoadError(
                f"{path} ({size} bytes) is truncated or not a safetensors file: {remedy} it again"
            ) from None
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


class TensorFile(SafetensorsHeader):
    """One safetensors file of this machine; a `TensorSource`."""

    def __init__(self, path: Path, wanted: frozenset[str] | None) -> None:
        """Raises ModelLoadError when the file is damaged or lacks a tensor that the index puts there."""
        try:
            with path.open("rb", buffering=0) as file:
                read = partial(_bytes_of, file.fileno())
                super().__init__(path, os.fstat(file.fileno()).st_size, read, "download")
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read ({error}): download it again") from error
        absent = sorted((wanted or frozenset()) - set(self.names))
        if absent:
            raise ModelLoadError(f"{path} lacks {name_some(absent)}, which {_INDEX} puts there: download both again")

    @contextmanager
    def opened(self) -> Iterator[int]:
        """See TensorSource."""
        with self.path.open("rb") as file:
            yield file.fileno()


def _bytes_of(file: int, start: int, stop: int) -> bytes:
    return os.pread(file, stop - start, start)


class _Entry(NamedTuple):
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """In the file."""
    stop: int


def _read_header(read: Callable[[int, int], bytes], size: int) -> tuple[Mapping[str, _Entry], Mapping[str, str]]:
    """The tensors in their order, and what the header says besides. Raises ValueError and the like for one that lies:
    tensors follow each other, and fill the file."""
    length = header_bytes(read(0, min(LENGTH_BYTES, size)) if size else b"", size)
    if length is None:
        raise ValueError("no header of weights is so long")
    begin = LENGTH_BYTES + length
    header = json.loads(read(LENGTH_BYTES, begin))
    metadata = {str(name): str(value) for name, value in (header.pop("__metadata__", None) or {}).items()}
    found = [(name, _entry(value, begin)) for name, value in header.items()]
    found.sort(key=lambda item: item[1][2:])
    ends = [begin, *(entry.stop for _, entry in found)]
    if [*(entry.start for _, entry in found), size] != ends or ends != sorted(ends):
        raise ValueError("gaps")
    return dict(found), metadata


def _entry(value: Mapping[str, Any], begin: int) -> _Entry:
    shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("no sizes")
    if _BITS[value["dtype"]] * math.prod(shape) != 8 * (stop - start):
        raise ValueError("another length")
    return _Entry(value["dtype"], shape, begin + start, begin + stop)


def _indexed_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    index = folder / _INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ModelLoadError(f"{index} has no weight_map of tensor names to file names: download it again")
    names_by_file: dict[str, set[str]] = {}
    for tensor, file in places.items():
        names_by_file.setdefault(file, set()).add(tensor)
    # A file name with a path in it could lead out of the folder.
    strange = sorted(file for file in names_by_file if file != Path(file).name)
    if strange:
        raise ModelLoadError(f"{index} names {name_some(strange)}: shards must lie beside it")
    missing = sorted(file for file in names_by_file if not os.path.isfile(folder / file))
    if missing:
        raise ModelLoadError(f"{folder} lacks {name_some(missing)}, named in {_INDEX}: download the missing shards")
    return {folder / file: frozenset(names_by_file[file]) for file in sorted(names_by_file)}


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        return (
            f"{folder} has weights only as {name_some(pickled)}, and loading pickled files can run code: convert them "
            "to safetensors (transformers: model.save_pretrained)"
        )
    return f"{folder} has no *.safetensors file: download the weights"


def name_some(names: list[str]) -> str:
    """Up to three names, as far as they are no longer than any, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name[:_MOST_SHOWN] for name in names[:3]) + more
