"""A model's GGUF files: their headers together."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_header import GgufHeader, parse_gguf, parts_named
from pagefleet_protocol.model_config.gguf_types import GgufKind

from pagefleet_engine.errors import ModelLoadError


class GgufTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    shape: tuple[int, ...]
    """Rows first."""
    type: GgufKind
    start: int
    """In the file."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the headers of a model's files say."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Numbers, flags and texts; arrays as lists of texts or as views of numbers."""
    tensors: Mapping[str, GgufTensor]
    """In the order of the files."""

    @property
    def source(self) -> str:
        """For messages."""
        return str(self.files[0])


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a file, and of the other parts where it is the first.

    Raises:
        ModelLoadError: a file is missing or damaged, or holds a type that is not read.
    """
    files = _parts_of(path)
    header = _read_header(files[0])
    metadata, tensors = header.metadata, _located(files[0], header)
    count = metadata.get("split.count", 1)
    if len(files) > 1 and count != len(files):
        raise ModelLoadError(f"{path} says that it has {count} parts, and its name {len(files)}: download it again")
    for file in files[1:]:
        more = _located(file, _read_header(file))
        if doubled := sorted(more.keys() & tensors.keys()):
            raise ModelLoadError(
                f"{file} holds {doubled[0][:80]!a}, and so does another part: download all parts again"
            )
        tensors |= more
    said = metadata.get("split.tensors.count", len(tensors))
    if said != len(tensors):
        raise ModelLoadError(f"{path} has {len(tensors)} tensors in its parts, and says {said}: download it again")
    return GgufModel(files, metadata, tensors)


def _parts_of(path: Path) -> tuple[Path, ...]:
    names = parts_named(path.name)
    if names is None:
        return (path,)
    parts = tuple(map(path.with_name, names))
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise ModelLoadError(
            f"{path.parent} lacks {', '.join(missing[:3]) or path.name}: download all parts of the model"
        )
    return parts


def _located(path: Path, header: GgufHeader) -> dict[str, GgufTensor]:
    tensors = header.tensors.items()
    return {name: GgufTensor(path, one.shape, one.type, one.start) for name, one in tensors}


def _read_header(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            if not file.seek(0, 2):
                return parse_gguf(b"", 0, str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_gguf(data, len(data), str(path))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}): give a GGUF file") from None
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
