"""Safetensors files that are read where they lie, as the loader sees them: headers first, then pieces of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagefleet_download.errors import DownloadError, StoreUnreachable
from pagefleet_download.source import RemoteFile
from pagefleet_download.weight_stream import WeightStream

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import SafetensorsHeader


class StreamedFile(SafetensorsHeader):
    """One file of a stream, as a `TensorSource`; `fill` is called by several threads at once."""

    def __init__(self, stream: WeightStream, file: RemoteFile) -> None:
        """Reads the header.

        Raises:
            ModelLoadError: the file is damaged.
            DownloadError: it cannot be read.
        """
        self._stream = stream
        self._file = file
        super().__init__(Path(file.name), file.size, self._read, "upload")

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
