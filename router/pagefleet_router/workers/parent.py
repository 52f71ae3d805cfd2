"""The parent of several workers: starts them, replaces those that die, passes signals on. Serves nothing itself.

Workers are forked before anything runs in the parent but this loop: no threads, no event loop. Each is in a process
group of its own, so that a terminal's Ctrl-C reaches the parent only.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pagefleet_protocol.private_folder import PrivateFolder

from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError
from pagefleet_router.workers.seat import Seat, last_beat, make_stamps, open_listeners

logger = logging.getLogger(__name__)

WRONG_SETTINGS = 2
"""Exit status of a worker that would fail again."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Before a worker is replaced: doubled each time, until one has lived for HEALTHY_S."""
HEALTHY_S = 10.0
SILENT_S = 60.0
"""Without a turn of its event loop a worker is killed, and replaced."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)
_SOONEST_S = 0.001
"""Of the alarm: none at all would be one that never rings."""


def run_workers(config: RouterConfig, serve: Callable[[RouterConfig, Seat], int]) -> int:
    """Run the workers that the settings ask for, until a signal; returns the exit status.

    Args:
        config: for all of them together; each gets its even share of what is counted.
        serve: runs one worker; returns its exit status. It fails with ConfigError where the settings cannot work.
    """
    num = config.workers
    share = replace(
        config,
        max_concurrent=math.ceil(config.max_concurrent / num),
        max_connections=math.ceil(config.max_connections / num),
    )

    def work(seat: Seat) -> int:
        try:
            return serve(share, seat)
        except ConfigError as error:
            print(f"pagefleet route: error: {error}", file=sys.stderr)
            return WRONG_SETTINGS

    return Parent(num, work).run(config.host, config.port)


@dataclass(slots=True)
class _Worker:
    """The occupant of one seat."""

    pid: int | None = None
    num_before: int = 0
    started_at: float = 0.0
    delay: float = FIRST_DELAY_S
    due_at: float = 0.0
    """When an empty seat is filled."""


class Parent:
    """Runs workers until a signal.

    Args:
        num: how many.
        work: runs one in its own process; returns its exit status.
        silent_s: seconds after which a worker that does not beat is killed.
    """

    def __init__(self, num: int, work: Callable[[Seat], int], silent_s: float = SILENT_S) -> None:
        self._workers = [_Worker() for _ in range(num)]
        self._work = work
        self._silent_s = silent_s
        self._stamps = make_stamps(num)
        self._listeners: tuple[socket.socket, ...] = ()
        self._lifeline, self._lifeline_end = -1, -1
        self._ending = False
        self._status = 0

    def run(self, host: str, port: int) -> int:
        """Return the exit status: the worst of the workers', once a signal has ended them.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._listeners = open_listeners(host, port, len(self._workers))
        port = self._listeners[0].getsockname()[1]
        self._lifeline, self._lifeline_end = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        with _private_folder() as folder:
            logger.info("%d workers share http://%s:%d", len(self._workers), host, port)
            try:
                self._watch(folder.path)
            finally:
                self._signal_all(signal.SIGKILL)
                os.close(self._lifeline_end)
                os.close(self._lifeline)
        return self._status

    def _watch(self, folder: Path) -> None:
        while True:
            self._fill_seats(folder)
            if self._ending and all(worker.pid is None for worker in self._workers):
                return
            # Not sigtimedwait: in a process that was stopped until its time was up it makes up a signal.
            signal.setitimer(signal.ITIMER_REAL, max(_SOONEST_S, self._until_next()))
            if signal.sigwaitinfo(_SIGNALS).si_signo in (signal.SIGTERM, signal.SIGINT):
                self._end()
            self._kill_silent()
            self._bury()

    def _fill_seats(self, folder: Path) -> None:
        if self._ending:
            return
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            if worker.pid is None and worker.due_at <= now:
                worker.started_at = now
                try:
                    worker.pid = self._fork(index, folder)
                except OSError as error:
                    logger.error("worker %d cannot be started (%s)", index, error.strerror)
                    worker.due_at = now + MAX_DELAY_S
                    continue
                worker.num_before += 1

    def _fork(self, index: int, folder: Path) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setpgid(0, 0)
            os.close(self._lifeline_end)
            for other, listener in enumerate(self._listeners):
                if other != index:
                    listener.close()
            # The parent's way to end would count as a status, and be worse than that of wrong settings.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            status = self._work(
                Seat(
                    index=index,
                    num_workers=len(self._workers),
                    listener=self._listeners[index],
                    folder=folder,
                    lifeline=self._lifeline,
                    stamps=self._stamps,
                    is_replacement=self._workers[index].num_before > 0,
                )
            )
        except Exception:
            logger.critical("worker %d ended", index, exc_info=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _until_next(self) -> float:
        """Return seconds until the next empty seat is due, or a worker may have been silent for too long."""
        due = [worker.due_at for worker in self._workers if worker.pid is None and not self._ending]
        return min(self._silent_s / 4, max(0.0, min(due, default=math.inf) - time.monotonic()))

    def _end(self) -> None:
        """Pass a signal on: the first drains, the next ends. Nobody else holds the sockets open then."""
        self._ending = True
        for listener in self._listeners:
            listener.close()
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            if worker.pid is not None:
                os.kill(worker.pid, number)  # not yet waited for, so that the id is still its own

    def _kill_silent(self) -> None:
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            beat = max(worker.started_at, last_beat(self._stamps, index))
            if worker.pid is not None and now - beat > self._silent_s:
                logger.error("worker %d has not moved for %.0f s: it is killed", index, now - beat)
                os.kill(worker.pid, signal.SIGKILL)

    def _bury(self) -> None:
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            if worker.pid is None:
                continue
            pid, how = os.waitpid(worker.pid, os.WNOHANG)
            if not pid:
                continue
            worker.pid = None
            status = os.waitstatus_to_exitcode(how)
            if self._ending or status == WRONG_SETTINGS:
                self._status = max(self._status, status if status >= 0 else 1)
                if not self._ending:
                    self._end()
                continue
            worker.delay = FIRST_DELAY_S if now - worker.started_at > HEALTHY_S else worker.delay
            logger.error("worker %d ended (%s): the next one starts in %.1f s", index, _cause(status), worker.delay)
            worker.due_at = now + worker.delay
            worker.delay = min(MAX_DELAY_S, 2.0 * worker.delay)


def _private_folder() -> PrivateFolder:
    try:
        return PrivateFolder("pagefleet-router-")
    except OSError as error:
        raise ConfigError(f"no folder can be made ({error.strerror}): set TMPDIR to one where it can") from error


def _cause(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
