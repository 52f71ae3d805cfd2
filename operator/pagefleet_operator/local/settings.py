"""How the local fleet behaves. Tests inject shorter times and programs of their own."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_download.download import download

from pagefleet_operator.autoscale.policy import Tempo
from pagefleet_operator.errors import CommandMissing
from pagefleet_operator.local.model_fetch import Download, Look
from pagefleet_operator.plan.workloads import Verb


@dataclass(frozen=True, slots=True)
class Commands:
    """The programs that the fleet starts, each as the beginning of a command line."""

    serve: tuple[str, ...]
    route: tuple[str, ...]

    def of(self, verb: Verb) -> tuple[str, ...]:
        """Return the beginning of the command line of `pagefleet <verb>`."""
        return self.serve if verb == "serve" else self.route

    @classmethod
    def installed(cls) -> Commands:
        """Find `pagefleet-serve` and `pagefleet-route` beside this Python, else on PATH.

        Raises:
            CommandMissing: one of them is nowhere.
        """
        return cls(serve=cls.serve_installed(), route=(_find("pagefleet-route"),))

    @classmethod
    def serve_installed(cls) -> tuple[str, ...]:
        """Find `pagefleet-serve` alone.

        Raises:
            CommandMissing: it is nowhere.
        """
        return (_find("pagefleet-serve"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, unless a name says otherwise."""

    probe_period: float = 1.0
    """Between two rounds of probes of one process."""
    starting_probe_period: float = 0.1
    """The same while the process is not ready yet."""
    probe_timeout: float = 5.0
    """A probe without an answer has failed."""
    pair_period: float = 5.0
    """Between two questions whether prefill and decode engines reach each other, and how busy they are."""
    figures_period: float = 2.0
    """Between two questions what each engine does, while a table shows it."""
    ready_failures: int = 3
    """Failed readiness probes in a row that take a ready process out of traffic."""
    live_failures: int = 6
    """Failed liveness probes in a row that end a process."""
    startup: float = math.inf
    """A process that is not ready once after this long is ended, or after spec.rollout.progressSeconds."""
    backoff_first: float = 1.0
    backoff_most: float = 60.0
    """Pause before a failed process is started again: doubles from the first to the most."""
    stable: float = 60.0
    """A process that was ready for this long starts again from the first pause."""
    settle: float = 1.0
    """Between taking an engine out of the endpoints file and asking it to end: the routers have to read the file."""
    kill_grace: float = 5.0
    """Beyond spec.rollout.drainSeconds, before SIGKILL."""
    file_poll: float = 0.5
    """Between two looks at the file; an edit counts once two looks agree."""
    resync: float = 2.0
    """Plans are compared with what runs at least this often."""
    scaling_period: float = 1.0
    """Between two decisions of an autoscaler."""
    tempo: Tempo = field(default_factory=Tempo)
    """How quickly those follow what routers say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Everything `pagefleet up` was told."""

    manifest: Path
    """File or folder of InferenceServices."""
    state_dir: Path
    """Logs, endpoints files and the record of processes."""
    models_dir: Path
    """Models of buckets, and links to those of the hub, for all fleets of this user."""
    commands: Commands
    download: Download = download
    """Brings a model into a folder."""
    look: Look | None = None
    """Says whether a download can work, before anything is started; None: nobody asks."""
    document: str | None = None
    """What `manifest` is to hold when the fleet starts; None: what somebody wrote into it."""
    host: str = "127.0.0.1"
    """Address of the routers; engines listen on the loopback only."""
    port: int = 8000
    """Of the first router; 0 takes a free one."""
    timing: Timing = Timing()


def _find(program: str) -> str:
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise CommandMissing(
            f"{program} is not installed in this environment: `make install` in the repository puts it there"
        )
    return found
