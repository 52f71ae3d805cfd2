"""Records what a thread and its device do for a while, as a trace of torch's that Perfetto opens (ui.perfetto.dev)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pagefleet_engine.errors import ProfileRefused

if TYPE_CHECKING:
    import torch

SUFFIX = ".json.gz"


class StepTrace(Protocol):
    """Records the work of steps, of which none is under way at either end."""

    def start(self) -> None:
        """Begin to record; the first time takes some seconds.

        Raises:
            ProfileRefused: it cannot.
        """
        ...

    def stop(self, stem: Path) -> Path:
        """End, and write what was recorded; takes seconds for a long one.

        Returns:
            The file, whose name begins with that of `stem`; with `rank*` in it, a pattern of several.

        Raises:
            ProfileRefused: it cannot be written.
        """
        ...


class ThreadTrace:
    """Implements `StepTrace` of the thread that calls it.

    Args:
        ending: of the names of its files, before their suffix.
    """

    def __init__(self, ending: str = "") -> None:
        self._ending = ending
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """See StepTrace. What an earlier one recorded and nobody ended is lost."""
        from torch import profiler  # noqa: PLC0415 few ever record

        self.discard()
        try:
            profile = profiler.profile()
            profile.start()
        except Exception as error:  # torch's, and of the device's library, which another profiler may hold
            raise ProfileRefused(f"No profile can be recorded: {error}") from error
        self._profile = profile

    def stop(self, stem: Path) -> Path:
        """See StepTrace."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise ProfileRefused("No profile is being recorded.")
        path = stem.with_name(f"{stem.name}{self._ending}{SUFFIX}")
        try:
            profile.stop()
            profile.export_chrome_trace(str(path))
        except Exception as error:  # as in `start`; and of the disk
            reason = error.strerror if isinstance(error, OSError) else error
            raise ProfileRefused(f"The profile cannot be written to {path.parent}: {reason}.") from error
        return path

    def discard(self) -> None:
        """End it, if it records, and write nothing."""
        profile, self._profile = self._profile, None
        if profile is not None:
            with suppress(Exception):  # as in `start`; nobody asked for what it recorded
                profile.stop()
