"""Whether the engine makes progress: judged by steps done, not by a process that exists."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_engine.engine_core.progress import Progress

READY_STALL_S = 10.0
LIVE_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the core makes progress."""

    alive: bool
    """The process exists."""
    stalled_s: float
    """Seconds without a step while work waits; 0 when idle."""

    @property
    def ready(self) -> bool:
        """Send it traffic."""
        return self.alive and self.stalled_s < READY_STALL_S

    @property
    def live(self) -> bool:
        """Keep the process."""
        return self.alive and self.stalled_s < LIVE_STALL_S


def judge(progress: Progress, alive: bool, work_since: float | None, now: float) -> EngineHealth:
    """Work out the health.

    Args:
        progress: the core's last stamp.
        alive: False when the process is gone.
        work_since: when the client's oldest spell of open requests began; None when it has none. A core that stopped
            while it was idle has an old stamp, and cannot have taken up work before it was sent.
        now: monotonic seconds.
    """
    began = progress.stamped_at
    if work_since is not None:
        began = max(began, work_since)
    elif not progress.busy:
        return EngineHealth(alive, 0.0)
    return EngineHealth(alive, max(0.0, now - began))
