"""What `pagefleet operate` was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_operator.handlers.backlog import Pace
from pagefleet_operator.handlers.lease import LeaseTimes
from pagefleet_operator.handlers.watches import WatchTimes
from pagefleet_operator.render.settings import ClusterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds."""

    resync: float = 300.0
    """Longest time between two looks at one InferenceService, and between two audits of the watches."""
    discovery: float = 20.0
    """Between two questions for optional kinds."""
    audit_behind: float = 30.0
    """Between two audits while a watch is behind."""
    watch_restart: float = 60.0
    """A watch that is behind for so long is started again."""
    scaling: float = 2.0
    """Between two decisions how many engines a service has."""
    finish: float = 5.0
    """What reconciles under way get when the operator is stopped."""
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperateSettings:
    """Constant for the operator's life."""

    cluster: ClusterSettings
    namespaces: tuple[str, ...] = ()
    """Whose InferenceServices are served; empty: those of the whole cluster."""
    identity: str
    """Names this process among the operators."""
    lease_name: str = "pagefleet-operator"
    leader_election: bool = True
    host: str = "0.0.0.0"  # noqa: S104 - probes come from the node
    port: int = 8080
    workers: int = 8
    writes_per_s: float = 50.0
    write_burst: int = 100
    kubeconfig: Path | None = None
    timing: Timing = field(default_factory=Timing)
