"""A program in a terminal that a test owns: what it shows, and keys that are typed."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

import pyte


class TerminalProgram:
    """Runs a command in a pseudo terminal of a size, until the `with` block ends."""

    def __init__(
        self, command: Sequence[str], columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._fd, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        # A terminal that is emulated answers no questions about its cursor.
        own = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "", "LINES": ""}
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        given = {**inherited, **{name: value for name, value in own.items() if value}, **(environment or {})}
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=given,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - before anything has threads
        )
        os.close(terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    @property
    def text(self) -> str:
        """What stands on the screen now, without the blanks at the ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """Read until `text` stands on the screen; returns the screen."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert self._read(deadline - time.monotonic()), f"{text!r} did not come:\n{self.text}"
        return self.text

    def wait_until_written(self, text: bytes, timeout_s: float = 60.0) -> None:
        """Read until `text` has come, also where it stands on the screen no more."""
        deadline = time.monotonic() + timeout_s
        while text not in self.written:
            assert self._read(deadline - time.monotonic()), f"{text!r} did not come:\n{self.text}"

    def wait_for_prompt(self, timeout_s: float = 60.0) -> None:
        """Read until the last line is an empty prompt: what is typed before it may be discarded."""
        deadline = time.monotonic() + timeout_s
        while not self.text.endswith("\n>"):
            assert self._read(deadline - time.monotonic()), f"no prompt came:\n{self.text}"

    def wait(self, timeout_s: float = 60.0) -> int:
        """Read until the program ends; returns its exit status."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, timeout_s: float) -> bool:
        """Show what was written; False where there is nothing and no more to come."""
        if timeout_s <= 0 or not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: the other side is closed
            return False
        self.written += data
        self._stream.feed(data)
        return bool(data)


def _take_terminal() -> None:
    """Make the terminal the one whose Ctrl-C reaches this process, also where tests run in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
