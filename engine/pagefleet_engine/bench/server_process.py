"""A server that lives as long as a benchmark needs it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from pagefleet_engine.errors import ConfigError

SERVE_COMMAND = (sys.executable, "-m", "pagefleet_engine.cli")
"""`pagefleet serve` of this installation."""
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_LOOK_S = 0.02


@contextmanager
def started_server(
    command: Sequence[str], log: IO[bytes] | None = None, timeout_s: float = _START_TIMEOUT_S
) -> Iterator[int]:
    """The port of a server that was started with this command; what it says goes to `log`, or the terminal.

    Raises:
        ConfigError: it cannot be started, ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started ({error.strerror}): check the command") from None
    try:
        _wait_until_ready(process, port, timeout_s)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def flag(name: str, value: object) -> str:
    """A setting as `pagefleet serve` takes it."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word}={value}"


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise ConfigError("the server did not start: what it said stands above")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_S)
    raise ConfigError(f"the server was not ready within {timeout_s:.0f} s")
