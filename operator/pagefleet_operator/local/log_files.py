"""What processes say: each into a file of its own, and line by line to whoever shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_MAX_LINE = 16_384
_MAX_FILE_BYTES = 16 << 20
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_STAMP = re.compile(r"^[\dT:,. -]{19,32}Z? +(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[: ]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ProcessLog:
    """One process's output. A full disk costs log lines, never the process."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self.path = path
        self.last_line = ""
        """The last line that is not empty, without control characters."""
        self.num_lost_bytes = 0
        """Not written because the disk refused."""
        self._on_line = on_line
        self._rest = b""
        self._size = path.stat().st_size if path.exists() else 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of output."""
        self._append(data)
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
            self.last_line = text
            self._on_line(text)

    def _append(self, data: bytes) -> None:
        try:
            if self._size > _MAX_FILE_BYTES:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._size = 0
            with self.path.open("ab") as file:
                file.write(data)
            self._size += len(data)
        except OSError:
            self.num_lost_bytes += len(data)


def without_stamp(line: str) -> str:
    """Return a log line from its message on: who reads a status knows the time, and that it is about an error."""
    return _STAMP.sub("", line)


def printable(text: str) -> str:
    """Remove what could move a terminal's cursor or change its colours; a progress bar keeps its last state."""
    return _CONTROL.sub("", _ESCAPES.sub("", text.rstrip("\r").rpartition("\r")[2]))
