"""The engine core's own process: `python -m pagefleet_engine.engine_core.process`, started by the API process.

Its standard input carries one line of JSON (`CoreStart`) and then stays open: when it closes, the API process is gone,
and so is this one at once. With `--ahead` the `EngineConfig` comes first, a line for which it imports torch. Signals
are the API process's business: it drains first and then ends the core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.errors import AddressTaken, KVConfigError
from pagefleet_kv.events.publisher import KvEventPublisher
from pagefleet_kv.port import EngineIdentity
from pagefleet_protocol.settings.log import set_up_logging

from pagefleet_engine.config import EngineConfig, cpu_threads
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.cores import binding_threads
from pagefleet_engine.cuda_context import open_ahead
from pagefleet_engine.engine_core.askers import Askers
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.garbage import GarbageSchedule
from pagefleet_engine.engine_core.messages import (
    AbortRequests,
    AddRequest,
    AskerGone,
    Drain,
    Profiled,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    StartFailed,
    StartProfile,
    StepOutputs,
    StopProfile,
)
from pagefleet_engine.engine_core.profiler import StepProfiler
from pagefleet_engine.engine_core.progress import ProgressWriter
from pagefleet_engine.engine_core.transport import BadMessage, CoreSocket, decode_to_core, socket_address
from pagefleet_engine.engine_core.wire import refusal
from pagefleet_engine.errors import ConfigError, EngineDead, InvalidRequest, ModelLoadError, ProfileRefused
from pagefleet_engine.gpu_size import visible_gpus
from pagefleet_engine.ranks.together import TogetherHandles
from pagefleet_engine.startup import StartupTimes

IDLE_WAIT_S = 1.0
TRANSFER_WAIT_S = 0.05
"""Longest wait while requests are open and none of them can get on: some connectors are to be asked again."""
STATS_INTERVAL_S = 0.25
"""Between two tellings of the totals, also while idle if transfers can change them: a lost peer is then known soon."""

_log = logging.getLogger(__name__)


class CoreStart(msgspec.Struct, frozen=True):
    """What the API process tells a new core."""

    folder: str
    """Private folder of both processes, with their sockets and `progress`."""
    sentinel: int
    """File descriptor that the other side watches: it closes when this process ends, however it ends."""
    config: EngineConfig
    incarnation: str
    """Of this start, 32 hexadecimal digits."""
    kv_events: KvEventsConfig | None = None
    """Where to publish what the prefix cache gains and loses."""
    fleet_key_file: str | None = None
    """Of the secret that the engines of one service share: who has it may be given K/V."""
    profiler_dir: str | None = None
    """An existing folder for profiles; None: none is recorded."""
    name: str = "engine core"
    """In the log."""
    num_askers: int = 1
    """API processes."""
    data_rank: int = 0
    together: TogetherHandles | None = None
    """What the data ranks share, if there are several."""


BuildCore = Callable[[CoreStart, CacheEvents | None, StartupTimes], tuple[EngineCore, Ready]]


class CoreLoop:
    """Moves messages between the sockets and the core until the core gives up.

    Args:
        core: to drive.
        socket: to the API processes.
        progress: stamped around each step.
        publisher: of KV events, if any: told after each turn that there may be some.
        profiler: of this thread, if any.
        num_askers: API processes.
    """

    def __init__(
        self,
        core: EngineCore,
        socket: CoreSocket,
        progress: ProgressWriter,
        publisher: KvEventPublisher | None = None,
        profiler: StepProfiler | None = None,
        num_askers: int = 1,
    ) -> None:
        self._askers = Askers(num_askers)
        self._profiler = profiler
        self._core = core
        self._socket = socket
        self._progress = progress
        self._publisher = publisher
        self._published = (0, 0)
        self._garbage = GarbageSchedule()
        self._outputs: list[RequestOutput] = []
        self._dropped = 0
        self._sent_at = 0.0
        self._settled = True
        self._is_news_to_all = False
        for bell in core.bells:
            socket.watch(bell)

    def run(self) -> None:
        """Serve for ever.

        Raises:
            EngineDead: the worker is broken.
            IntegrityError: requests or blocks are lost.
        """
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Take messages, run a step where there is work, and send what there is to tell."""
        core = self._core
        for asker, data in self._socket.receive(self._wait(idle_wait_s)):
            self._handle(asker, data)
        if core.has_work:
            self._step()
        else:
            if not self._settled:
                self._settle()
            self._outputs += core.settle()
        if self._profiler is not None and self._profiler.is_full():
            with self._profiling():
                self._profiler.end()
        self._flush()

    def _wait(self, idle_wait_s: float) -> float:
        """How long to wait for messages: not at all while there may be something to compute."""
        if self._core.has_work:
            return min(TRANSFER_WAIT_S, idle_wait_s) if self._core.is_stalled else 0.0
        if not self._settled:
            return 0.0
        return min(STATS_INTERVAL_S, idle_wait_s) if self._core.has_connector else idle_wait_s

    def _step(self) -> None:
        core = self._core
        self._settled = False
        # Before the step: one that hangs has then said when it began. Requests that wait for K/V from elsewhere alone
        # are no reason for a step.
        self._progress.stamp(busy=core.is_due)
        self._outputs += core.step()
        self._progress.stamp(busy=core.is_due, steps=0 if core.is_stalled else 1)
        self._garbage.between_steps()
        if self._profiler is not None:
            self._profiler.count_step()

    def _settle(self) -> None:
        """Use the first idle moment for what no step should wait for."""
        self._progress.stamp(busy=False)
        self._core.check_integrity()
        self._garbage.when_idle()
        self._sent_at = 0.0
        self._settled = True
        self._is_news_to_all = self._askers.num > 1  # who got the last outputs alone knows that there are none left

    def _flush(self) -> None:
        if self._publisher is not None:
            self._publisher.flush()
        now = time.monotonic()
        may_change = self._core.has_work or self._core.has_connector or self._publishing() != self._published
        due = self._is_news_to_all or (may_change and now - self._sent_at > STATS_INTERVAL_S)
        shares = self._askers.share_out(self._outputs)
        self._outputs = []
        if not shares and not due:
            return
        self._published = self._publishing()
        stats = msgspec.structs.replace(
            self._core.stats(),
            messages_dropped=self._dropped,
            kv_events=self._published[0],
            kv_events_dropped=self._published[1],
        )
        for asker in range(self._askers.num) if due else shares:
            self._socket.send(StepOutputs(shares.get(asker, []), stats), asker)
        if due or self._askers.num == 1:
            self._sent_at, self._is_news_to_all = now, False

    def _publishing(self) -> tuple[int, int]:
        """Batches published, and what was dropped."""
        publisher = self._publisher
        return (0, 0) if publisher is None else (publisher.num_published, publisher.num_dropped)

    def _handle(self, asker: int, data: bytes) -> None:
        try:
            message = decode_to_core(data)
        except BadMessage as error:
            self._dropped += 1
            _log.warning("dropped a message of %d bytes: %s", len(data), error.reason)
            if error.request_id is not None:
                self._askers.begin([error.request_id], asker)
                self._outputs.append(refusal(error.request_id, InvalidRequest(error.reason, error.param, error.code)))
            return
        match message:
            case AddRequest() if self._askers.is_gone(message.request_id, asker):
                pass
            case AddRequest():
                self._askers.begin(message.output_ids, asker)
                self._outputs += self._core.add(message)
            case AbortRequests():
                self._outputs += self._core.abort(message.request_ids)
            case AskerGone():
                self._core.abort(self._askers.forget(message.asker, message.start))
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Drain():
                self._core.drain()
            case StartProfile() | StopProfile():
                self._socket.send(self._profile(message), asker)

    def _profile(self, message: StartProfile | StopProfile) -> Profiled:
        """Begin or end a profile, which may take longer than a step ever does."""
        if self._profiler is None:
            return Profiled(refused="This engine records no profiles.")
        with self._profiling():
            try:
                if isinstance(message, StopProfile):
                    return Profiled(str(self._profiler.stop()))
                self._profiler.start()
            except ProfileRefused as error:
                return Profiled(refused=str(error))
        return Profiled()

    @contextlib.contextmanager
    def _profiling(self) -> Iterator[None]:
        """Requests wait, and that is no hang: the probes see a core that has nothing to do. No step is under way."""
        self._outputs += self._core.finish_steps()
        self._progress.stamp(busy=False)
        try:
            yield
        finally:
            self._garbage.keep()  # torch's profiler loads and makes objects by the hundred thousand
            self._progress.stamp(busy=self._core.is_due)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a core knows once it is told to start."""

    start: CoreStart
    progress: ProgressWriter
    times: StartupTimes
    """Since then."""


def _wait_for_start() -> _Told | None:
    """Be told; None: the parent is gone, or has found that it needs no core."""
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    start = msgspec.json.decode(line, type=CoreStart)
    set_up_logging(start.name, "pagefleet_engine", "pagefleet_kv")
    for fd in (start.sentinel, *(() if start.together is None else start.together.fds)):
        os.set_inheritable(fd, False)
    folder = Path(start.folder)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    progress = ProgressWriter(folder / "progress")
    return _Told(start, progress, StartupTimes(tell=progress.loading))


def run_core(build: BuildCore, wait_for_start: Callable[[], _Told | None] = _wait_for_start) -> int:
    """Run a core process to its end.

    Args:
        build: loads the model and makes the core.
        wait_for_start: returns what the core is told, if it is.

    Returns:
        Exit status; 0 only if it is not told to start, as the process ends by its parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told = wait_for_start()
    if told is None:
        return 0
    start, progress = told.start, told.progress
    folder = Path(start.folder)
    socket = CoreSocket([socket_address(folder, asker) for asker in range(start.num_askers)])
    with contextlib.ExitStack() as stack:
        try:
            publisher = None
            if start.kv_events is not None:  # before the model: a port in use is told at once
                publisher = stack.enter_context(KvEventPublisher(start.kv_events, start.incarnation))
            core, ready = build(start, None if publisher is None else publisher.cache_events, told.times)
        except Exception as error:  # the process's top: the user gets one line, the log gets the rest
            failed, status = _explain(error)
            socket.send(failed)
            socket.close()
            return status
        GarbageSchedule().take_over()
        socket.send(ready)
        try:
            traces = start.profiler_dir
            profiler = None if traces is None else StepProfiler(Path(traces), core.executor.trace)
            CoreLoop(core, socket, progress, publisher, profiler, start.num_askers).run()
        except EngineDead as error:  # which says all; the operator looks for this name in the log
            _log.error("EngineDead: %s", error)
        except Exception:  # the process's top: whatever it was, this core is done
            _log.exception("the engine core gives up")
    core.shutdown()
    socket.close()
    return 1


def _explain(error: Exception) -> tuple[StartFailed, int]:
    """Return what to tell the user of a core that could not start, and its exit status."""
    line = " ".join(str(error).split())
    if isinstance(error, ConfigError | KVConfigError | MemoryError):
        by_setting = not isinstance(error, ModelLoadError | MemoryError)
        return StartFailed(line or "the model does not fit the memory", by_setting, isinstance(error, AddressTaken)), 2
    _log.error("the engine core could not start", exc_info=error)
    return StartFailed(f"the engine core could not start: {type(error).__name__}: {line[:300]}"), 1


def _end_with_parent(folder: Path) -> None:
    try:
        while os.read(sys.stdin.fileno(), 4096):  # not through the buffer, whose lock would outlive the interpreter
            pass
    finally:  # whatever ended the watch: a core that nobody watches must not go on
        shutil.rmtree(folder, ignore_errors=True)  # a killed parent leaves it behind
        os._exit(0)


def main() -> int:
    """Run the real core."""
    return run_core(_import_and_build, _import_ahead if "--ahead" in sys.argv[1:] else _wait_for_start)


def _import_ahead() -> _Told | None:
    """Import while the parent finds out what to tell. What fails here fails again for whoever is told of it."""
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    told: Future[_Told] = Future()

    def listen() -> None:
        try:
            found = _wait_for_start()
            if found is None:  # at once, whatever is being imported
                os._exit(0)
            found.progress.loading("imports", 0, 0)
            told.set_result(found)
        except BaseException as error:  # the other thread's to raise
            told.set_exception(error)

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(Exception):
        _import(msgspec.json.decode(line, type=EngineConfig), StartupTimes())
    is_late = told.done()
    found = told.result()
    if is_late:
        found.times.include({"imports": found.times.total})
    return found


def _import_and_build(
    start: CoreStart, cache_events: CacheEvents | None, times: StartupTimes
) -> tuple[EngineCore, Ready]:
    _import(start.config, times)
    from pagefleet_engine.engine_core.build import build_core  # noqa: PLC0415 as there

    identity = EngineIdentity(start.incarnation, start.fleet_key_file)
    return build_core(start.config, times, cache_events, identity, start.together, start.data_rank)


def _import(config: EngineConfig, times: StartupTimes) -> None:
    """What building takes, with torch, which is slow: the parent is watched meanwhile."""
    if not config.has_processes and "torch" not in sys.modules:  # else it was imported ahead, and this done
        open_ahead(config.model.device)
    with times.importing(), binding_threads(_threads_to_bind(config)):
        import pagefleet_engine.engine_core.build  # noqa: F401, PLC0415


def _threads_to_bind(config: EngineConfig) -> int:
    """Those of a model that is computed on a CPU in this process; 0: it is computed elsewhere."""
    device = config.model.device
    if config.has_processes or device == "cuda" or (device == "auto" and visible_gpus()):
        return 0
    return cpu_threads(config.model.num_threads)


if __name__ == "__main__":
    sys.exit(main())
