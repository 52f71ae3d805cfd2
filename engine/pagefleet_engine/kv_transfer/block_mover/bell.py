"""A file descriptor that one thread makes readable to wake another, which waits for it beside its sockets."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """A pipe with at most a little in it. Any thread may ring, at any time until it is closed."""

    def __init__(self) -> None:
        self.file_descriptor, self._write_end = os.pipe()
        """Readable from the first `ring` to the next `clear`."""
        os.set_blocking(self.file_descriptor, False)
        os.set_blocking(self._write_end, False)

    def ring(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._write_end, b"\0")

    def clear(self) -> None:
        """Make it unreadable; what rings from now on is heard again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.file_descriptor, 4096):
                pass

    def close(self) -> None:
        """Close both ends; nobody may ring any more."""
        os.close(self.file_descriptor)
        os.close(self._write_end)
