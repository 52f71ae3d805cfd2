"""An engine core's process: of those who start it, and of those who are told of one that runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from pagefleet_kv.config import KvEventsConfig
from pagefleet_protocol.private_folder import PrivateFolder

from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.engine_core.process import CoreStart
from pagefleet_engine.ranks.together import TogetherHandles


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a core has to do with beside its API process."""

    kv_events: KvEventsConfig | None = None
    """Where it publishes what its prefix cache gains and loses; None: nowhere."""
    fleet_key_file: str | None = None
    """Of the secret that the engines of its service share; None: it is of no fleet."""
    profiler_dir: str | None = None
    """An existing folder for profiles; None: none is recorded."""
    name: str = "engine core"
    """In the log."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Variables by which it sees no devices but its own."""
    num_askers: int = 1
    """API processes."""
    data_rank: int = 0
    together: TogetherHandles | None = None
    """What the data ranks share, if there are several; the first of them closes it."""


class CoreProcess:
    """One child process, with the private folder that both sides share.

    Args:
        config: of the engine.
        command: of the process.
        around: it.
        ahead: the process, where it was begun before.

    Attributes:
        folder: private to both sides.
        incarnation: 32 hexadecimal digits, drawn for this one process: a new one has a new, empty cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = CORE_COMMAND,
        around: Surroundings | None = None,
        ahead: ChildProcess | None = None,
    ) -> None:
        self._private = PrivateFolder("pagefleet-engine-")
        self.folder = self._private.path
        self.incarnation = uuid.uuid4().hex
        self.config = config
        self._around = around or Surroundings()
        self._child = ahead or ChildProcess(command, self._around.devices)
        self._shared = None if self._around.data_rank else self._around.together

    @property
    def pid(self) -> int:
        """Of the running child."""
        return self._child.pid

    def start(self, on_exit: Callable[[], None]) -> None:
        """Start the child; `on_exit` is called in the running event loop when it ends."""

        def told(sentinel: int) -> bytes:
            return msgspec.json.encode(
                CoreStart(
                    str(self.folder),
                    sentinel,
                    self.config,
                    self.incarnation,
                    self._around.kv_events,
                    self._around.fleet_key_file,
                    self._around.profiler_dir,
                    self._around.name,
                    self._around.num_askers,
                    self._around.data_rank,
                    self._around.together,
                )
            )

        together = self._around.together
        self._child.start(told, on_exit, () if together is None else together.fds)

    def exit_status(self) -> str:
        """Say in words how the child ended."""
        return self._child.exit_status()

    def stop(self) -> None:
        """End the child at once and remove the folder. A second call does nothing."""
        self._child.stop()
        self._private.remove()
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class RunningCore(msgspec.Struct, frozen=True):
    """A core that has loaded its model, as one API process tells another."""

    folder: str
    pid: int
    incarnation: str
    ready: Ready


class CoreAtHand:
    """A core that another process has started: implements what `CoreLink` needs of one.

    Args:
        core: that runs.
        config: of the engine.
    """

    def __init__(self, core: RunningCore, config: EngineConfig) -> None:
        self.folder = Path(core.folder)
        self.pid = core.pid
        self.incarnation = core.incarnation
        self.config = config
        self._on_exit: Callable[[], None] | None = None

    def start(self, on_exit: Callable[[], None]) -> None:
        """Have `on_exit` called when `ended` is."""
        self._on_exit = on_exit

    def ended(self) -> None:
        """Note that the process which started it said so, or is gone itself."""
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            on_exit()

    def exit_status(self) -> str:
        """Say in words that it ended: only its parent knows how."""
        return "ended"

    def stop(self) -> None:
        """Hear no more of it."""
        self._on_exit = None
