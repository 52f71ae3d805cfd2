"""What processes say: each into a file of its own, and line by line to whoever shows it."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

_MAX_LINE = 16_384
_NUM_LAST_LINES = 40
"""An engine may say why it ends some lines before the last."""
MAX_FILE_BYTES = 16 << 20
MAX_FOLDER_BYTES = 256 << 20
_LOG = re.compile(r".+\.log(\.1)?")
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_STAMP = re.compile(r"^[\dT:,. -]{19,32}Z? +(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[: ]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LogFolder:
    """The logs of a fleet, of this run and of earlier ones: bounded one by one, and all together.

    A log that is full becomes NAME.log.1, in place of the one before. Where all are too many, what was written longest
    ago goes first.
    """

    def __init__(self, path: Path, max_file: int = MAX_FILE_BYTES, max_all: int = MAX_FOLDER_BYTES) -> None:
        """Find what is there; `max_file` and `max_all` are in bytes."""
        self.path = path
        self._max_file, self._max_all = max_file, max_all
        found = sorted((file.stat().st_mtime, file) for file in path.iterdir() if _LOG.fullmatch(file.name))
        self._sizes = {file: file.stat().st_size for _, file in found}
        """In the order in which they were last written."""

    def path_of(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def append(self, name: str, data: bytes) -> None:
        """Append to the log of a process.

        Raises:
            OSError: the disk refuses.
        """
        path = self.path_of(name)
        if path in self._sizes and self._sizes[path] + len(data) > self._max_file:
            aside = path.with_name(f"{path.name}.1")
            with contextlib.suppress(FileNotFoundError):  # somebody tidied up
                path.replace(aside)
            self._sizes.pop(aside, None)
            self._sizes[aside] = self._sizes.pop(path)
        while sum(self._sizes.values()) + len(data) > self._max_all:
            oldest = next((file for file in self._sizes if file != path), None)
            if oldest is None:
                break
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
        with path.open("ab") as file:
            file.write(data)
        self._sizes[path] = self._sizes.pop(path, 0) + len(data)


class ProcessLog:
    """One process's output. A full disk costs log lines, never the process."""

    def __init__(self, folder: LogFolder, name: str, on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        """Those that are not empty, without control characters."""
        self.num_lost_bytes = 0
        """Not written because the disk refused."""
        self.path = folder.path_of(name)
        self._folder = folder
        self._name = name
        self._on_line = on_line
        self._rest = b""

    @property
    def last_line(self) -> str:
        """The newest one; empty before there is any."""
        return self.last_lines[-1] if self.last_lines else ""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of output."""
        try:
            self._folder.append(self._name, data)
        except OSError:
            self.num_lost_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._tell(line)

    def close(self) -> None:
        """Take what came without a line's end as the last line."""
        rest, self._rest = self._rest, b""
        self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = printable(line[:_MAX_LINE].decode("utf-8", "replace")).rstrip()
        if text:
            self.last_lines.append(text)
            self._on_line(text)


def without_stamp(line: str) -> str:
    """Return a log line from its message on: who reads a status knows the time, and that it is about an error."""
    return _STAMP.sub("", line)


def printable(text: str) -> str:
    """Remove what could move a terminal's cursor or change its colours; a progress bar keeps its last state."""
    return _CONTROL.sub("", _ESCAPES.sub("", text.rstrip("\r").rpartition("\r")[2]))
