"""The access log: one JSON line per request. It names what was asked of whom, never the request's text."""

from __future__ import annotations

from typing import TextIO

import msgspec


class AccessRecord(msgspec.Struct, frozen=True):
    """One finished request. Times in milliseconds."""

    request_id: str
    route: str
    status: int
    engine: str | None
    retries: int
    first_byte_ms: float | None
    total_ms: float
    bytes_out: int
    model: str | None = None
    prompt_tokens: int = 0
    """Counted, or estimated from the prompt's bytes."""
    cached_tokens: int = 0
    """Of these, what the engine probably had cached."""
    queue_ms: float = 0.0
    """Until the request was let in."""


PIPE_BYTES = 4096
"""What a pipe takes as one piece (PIPE_BUF): lines of several processes stay whole."""


class AccessLog:
    """Writes records as lines; a sink that is gone ends the log, not the router."""

    def __init__(self, out: TextIO) -> None:
        self._out: TextIO | None = out
        self._encoder = msgspec.json.Encoder()
        self._lines: list[str] = []
        self._num_bytes = 0

    def write(self, record: AccessRecord) -> None:
        """Write one line."""
        if self._out is None:
            return
        line = self._encoder.encode(record) + b"\n"
        if self._num_bytes + len(line) > PIPE_BYTES:
            self.flush()
        self._lines.append(line.decode())
        self._num_bytes += len(line)

    def flush(self) -> None:
        """Push out what is buffered; called once in a while."""
        text = "".join(self._lines)
        self._lines.clear()
        self._num_bytes = 0
        if self._out is not None and text:
            try:
                self._out.write(text)
                self._out.flush()
            except OSError:
                self._out = None
