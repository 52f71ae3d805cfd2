"""The headers of a model's GGUF files, of which only as much is read as they are long."""

from __future__ import annotations

import asyncio

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_header import GgufHeader, HeaderTensor, MoreNeeded, parse_gguf

from pagefleet_download.errors import BadModel
from pagefleet_download.reading import read_range
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import ModelSource, RemoteFile

_FIRST_BYTES = 1 << 20
_MOST_BYTES = 256 << 20
"""Vocabularies of a quarter of a million tokens take a tenth of it."""


async def gguf_header(source: ModelSource, files: list[RemoteFile], settings: DownloadSettings) -> GgufHeader:
    """What the headers of a model's parts say, the first part's metadata.

    Raises:
        BadModel: a part is damaged, or holds a type that is not read.
    """
    first = await _header(source, files[0], settings)
    tensors: dict[str, HeaderTensor] = dict(first.tensors)
    for file in files[1:]:
        more = (await _header(source, file, settings)).tensors
        if doubled := sorted(more.keys() & tensors.keys()):
            raise BadModel(f"{file.name} holds {doubled[0][:80]!a}, and so does another part: repair the model")
        tensors |= more
    return GgufHeader(first.source, first.metadata, tensors)


async def _header(source: ModelSource, file: RemoteFile, settings: DownloadSettings) -> GgufHeader:
    data, wanted = b"", min(_FIRST_BYTES, file.size)
    while True:
        if wanted > len(data):
            data += await read_range(source, file, len(data), wanted, settings)
        try:
            return await asyncio.to_thread(parse_gguf, data, file.size, file.name)
        except MoreNeeded as more:
            if more.stop > _MOST_BYTES:
                raise BadModel(f"{file.name} has a header of over {_MOST_BYTES} bytes: repair the model") from None
            wanted = min(max(more.stop, 4 * len(data)), _MOST_BYTES, file.size)
        except ModelConfigError as error:
            raise BadModel(str(error)) from None
