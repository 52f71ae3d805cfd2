"""How large the tensors of a checkpoint are, from the first bytes of its files.

A safetensors file is a length, a header of that length, and the tensors without gaps. Source: the format's description
in the README of huggingface/safetensors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import msgspec

from pagefleet_download.errors import BadModel
from pagefleet_download.reading import read_range, side_by_side
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import ModelSource, RemoteFile

LENGTH_BYTES = 8
"""Of the length that a file begins with."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_SMALL_HEADER_BYTES = 1 << 20
_FILE_PER_HEADER = 32
"""Least bytes of a file for one of a header that is not small. Who reads it takes some twenty for it."""
_OF_EXPERTS = re.compile(r"\.experts\.|\.block_sparse_moe\.(input|output)_linear\.")
"""Tensors of experts that tokens choose from; the second names are Granite's. Shared ones are called otherwise."""


async def read_headers(
    source: ModelSource, files: list[RemoteFile], settings: DownloadSettings, *, names: bool
) -> tuple[int, Mapping[str, int]]:
    """Return the bytes of all tensors, and of each by its name where `names` are wanted: headers are read for these.

    Raises:
        DownloadError: a file cannot be read, or is truncated.
    """
    total = 0
    tensors: dict[str, int] = {}
    one_header = asyncio.Lock()  # they may be large, and a container's memory is not

    async def add(file: RemoteFile) -> None:
        nonlocal total
        before = await _bytes_before_tensors(source, file, settings)
        total += file.size - before  # not in one line with the wait: others add meanwhile
        if names:
            async with one_header:
                tensors.update(_sizes(await read_range(source, file, LENGTH_BYTES, before, settings), file))

    await side_by_side(add, files, settings.parallel_files)
    return total, tensors


def header_bytes(beginning: bytes, size: int) -> int | None:
    """Return the length of the header of a file of `size` bytes that begins so.

    None: no file of weights is so. It is cut, or its header would take more memory than its tensors.
    """
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little") if size > LENGTH_BYTES else 0
    most = min(_MAX_HEADER_BYTES, size - LENGTH_BYTES, max(_SMALL_HEADER_BYTES, size // _FILE_PER_HEADER))
    return length if 0 < length <= most else None


def expert_bytes(tensors: Mapping[str, int]) -> int:
    """Return those of experts that tokens choose from."""
    return sum(size for name, size in tensors.items() if _OF_EXPERTS.search(name))


async def _bytes_before_tensors(source: ModelSource, file: RemoteFile, settings: DownloadSettings) -> int:
    beginning = await read_range(source, file, 0, min(LENGTH_BYTES, file.size), settings) if file.size else b""
    length = header_bytes(beginning, file.size)
    if length is None:
        raise _broken(file)
    return LENGTH_BYTES + length


class _Tensor(msgspec.Struct):
    """What is of interest of a tensor in a header."""

    data_offsets: tuple[int, int]


def _sizes(header: bytes, file: RemoteFile) -> dict[str, int]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        spans = {name: msgspec.json.decode(one, type=_Tensor).data_offsets for name, one in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _broken(file) from None
    sizes = {name: stop - start for name, (start, stop) in spans.items()}
    if any(size < 0 for size in sizes.values()) or sum(sizes.values()) > file.size:
        raise _broken(file)
    return sizes


def _broken(file: RemoteFile) -> BadModel:
    return BadModel(f"{file.name} ({file.size} bytes) is truncated or not a safetensors file: repair the model")
