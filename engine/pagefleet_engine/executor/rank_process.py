"""A rank's own process: `python -m pagefleet_engine.executor.rank_process`, started by the `ProcessExecutor`.

Its standard input carries one line of JSON (`RankStart`) and then stays open: when it closes, the executor's process is
gone, and so is this one at once. Signals are the business of whoever serves.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
from pagefleet_protocol.settings.log import set_up_logging

from pagefleet_engine.cores import binding_threads
from pagefleet_engine.cuda_context import open_ahead
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.executor.messages import RankStart, StartFailed, StartFault, encode
from pagefleet_engine.executor.rank_loop import BuiltRank, RankLoop, describe, wait_on
from pagefleet_engine.executor.ring import RingReader, RingWriter
from pagefleet_engine.executor.trace import ThreadTrace
from pagefleet_engine.executor.vital_signs import STAMP_S, OwnSigns
from pagefleet_engine.startup import StartupTimes

_log = logging.getLogger(__name__)

BuildRank = Callable[[RankStart, StartupTimes, OwnSigns], BuiltRank]


def run_rank(build: BuildRank) -> int:
    """Run a rank to its end.

    Args:
        build: loads its part of the model.

    Returns:
        Exit status; 0 never, as the process ends by its parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    set_up_logging(start.name, "pagefleet_engine")
    logging.getLogger("pagefleet_engine").setLevel(start.log_level)
    for fd in start.fds:
        os.set_inheritable(fd, False)
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    signs = OwnSigns(start.signs, start.num_places, start.place)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_stamp, args=(signs,), daemon=True).start()
    replies = RingWriter(start.replies)
    times = StartupTimes(tell=signs.loading)
    try:
        built = build(start, times, signs)
    except Exception as error:  # the process's top: the user gets one line, the log gets the rest
        failed = _explain(error)
        if failed.fault == "other":
            _log.error("rank %d could not start", start.rank, exc_info=error)
        replies.send(encode(failed), wait_on)
        return 2
    replies.send(encode(built.loaded), wait_on)
    built.end_loading()
    commands = RingReader(start.commands, start.place)
    trace = ThreadTrace(f"-rank{start.rank}")
    RankLoop(start.part, built, commands, replies, signs, trace).run()
    return 1


def _explain(error: Exception) -> StartFailed:
    fault: StartFault = "other"
    if isinstance(error, ModelLoadError):
        fault = "model"
    elif isinstance(error, ConfigError):
        fault = "config"
    elif isinstance(error, MemoryError):
        fault = "memory"
    return StartFailed(fault, str(error) if fault in ("model", "config") else describe(error))


def _stamp(signs: OwnSigns) -> None:
    while True:
        signs.stamp()
        time.sleep(STAMP_S)


def _end_with_parent() -> None:
    try:
        while os.read(sys.stdin.fileno(), 4096):  # not through the buffer, whose lock would outlive the interpreter
            pass
    finally:  # whatever ended the watch: a rank that nobody watches must not go on
        os._exit(0)


def main() -> int:
    """Run a rank with a real model."""
    return run_rank(_import_and_build)


def _import_and_build(start: RankStart, times: StartupTimes, signs: OwnSigns) -> BuiltRank:
    open_ahead(start.config.model.device)
    with times.importing(), binding_threads(start.num_threads if start.cores else 0):
        from pagefleet_engine.executor.rank import build_rank  # noqa: PLC0415 torch is slow: the parent is watched

    return build_rank(start, times, signs)


if __name__ == "__main__":
    sys.exit(main())
