"""Server-sent events, as far as a relay must know them: where one ends.

An event is passed on whole or not at all, so that an error event can follow whatever an engine left behind.
"""

from __future__ import annotations

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MAX_HELD = 256 * 1024
"""An event longer than this is passed on in parts."""


class EventHold:
    """Holds back the beginning of an event until its end came. Bytes are never changed."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> bytes:
        """Take what came and return what may be sent."""
        if not self._held and data.endswith(_ENDS):
            return data
        data = self._held + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)
        if end == 0 and len(data) > _MAX_HELD:
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """Return what is still held: the stream ended on purpose."""
        data, self._held = self._held, b""
        return data
