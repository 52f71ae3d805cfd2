"""An engine of one conversation's own: started on a free port, gone when the `with` block ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from pagefleet_protocol.exit_status import MISTAKE, MODEL_NOT_LOADED
from pagefleet_protocol.load_progress import LoadProgress, decode_loading

from pagefleet_operator.errors import ChatError
from pagefleet_operator.local.launcher import base_url, wait_policy
from pagefleet_operator.local.log_files import printable, without_stamp
from pagefleet_operator.local.machine import free_port
from pagefleet_operator.local.process import die_with_parent, exit_text

_HOST = "127.0.0.1"
_ANSWER_S = 5.0
_END_S = 10.0
_TAIL_BYTES = 8192
_KEPT_DAYS = 7


class EngineFailed(ChatError):
    """The engine ended; `status` is what we end with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineRun:
    """One `pagefleet serve`.

    Args:
        command: the beginning of its command line, with the model.
        logs: folder for what it says; the log of a run that ends well is removed.
        environment: ours.

    Attributes:
        url: where it answers.
    """

    def __init__(self, command: Sequence[str], logs: Path, environment: Mapping[str, str]) -> None:
        self._port = free_port(_HOST)
        self.url = base_url(_HOST, self._port)
        self._command = (*command, "--host", _HOST, "--port", str(self._port), "--drain-timeout", "0")
        self._environment = {**environment, "PYTHONUNBUFFERED": "1", **wait_policy(environment)}
        self._log = logs / f"engine-{os.getpid()}.log"
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with _new_log(self._log) as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # a Ctrl-C that stops an answer must not end it
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - there are no threads yet
            )
        return self

    def __exit__(self, *_: object) -> None:
        process = self._running
        ended_before = process.poll()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # it, and what it may have left
        process.wait()
        if ended_before is None:
            self._log.unlink(missing_ok=True)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "outside of the block"
        return self._process

    def loading(self) -> LoadProgress | None:
        """Ask how far it is; None: it is ready.

        Raises:
            EngineFailed: it has ended.
        """
        if (why := self.failure()) is not None:
            raise why
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/readyz")
                answer = connection.getresponse()
                told = decode_loading(answer.read(65_536))
            except (OSError, http.client.HTTPException):
                return LoadProgress(seconds=time.monotonic() - self._began)
        if answer.status == 200:
            return None
        return told or LoadProgress(seconds=time.monotonic() - self._began)

    def failure(self, within_s: float = 0.0) -> EngineFailed | None:
        """Return how it ended; None where it runs, and goes on for `within_s`."""
        try:
            status = self._running.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        words = self.last_words()
        ours = status if status in (MISTAKE, MODEL_NOT_LOADED) else 1
        return EngineFailed(
            f"the engine ended: {words or 'it said nothing'} ({exit_text(status)}; log: {self._log})", ours
        )

    def last_words(self) -> str:
        """Return the last line that it wrote."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            lines = [printable(line) for line in file.read().decode("utf-8", "replace").split("\n")]
            return next((without_stamp(line)[:600] for line in reversed(lines) if line.strip()), "")
        return ""


def _new_log(path: Path) -> BinaryIO:
    """Open a log that only its owner reads, and remove those of old failures beside it.

    Raises:
        ChatError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in path.parent.glob("engine-*.log"):
            if time.time() - old.stat().st_mtime > _KEPT_DAYS * 86400:
                old.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ChatError(f"{path} cannot be written ({error.strerror}): XDG_STATE_HOME names another folder") from error
    return os.fdopen(descriptor, "wb")
