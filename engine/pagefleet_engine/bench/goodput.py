"""Requests that were served as promised, per second (Zhong et al., DistServe, arXiv 2401.09670).

A request's latencies: TTFT to its first token, TPOT the mean of the gaps after that, ITL each gap, E2E to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.errors import ConfigError

MEASURES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request that was completed, in seconds from the moment it was sent."""

    sent_at: float
    """From the start of the run."""
    num_input_tokens: int
    token_times: Sequence[float]
    """When tokens came, at least once; a server may send several at a time."""
    num_counted: int = 0
    """Tokens of the answer as the server counts them; 0: it does not, and each time is one token's."""

    @property
    def num_output_tokens(self) -> int:
        """Of the answer."""
        return self.num_counted or len(self.token_times)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.token_times[0]

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 for an answer of one token."""
        gaps = self.num_output_tokens - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else 0.0

    @property
    def itl(self) -> list[float]:
        """Each gap between two times at which tokens came."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.token_times[-1]


def parse_slo(parts: Sequence[str]) -> dict[str, float]:
    """From ["ttft:500", "tpot:50"], in milliseconds, to seconds by measure.

    Raises:
        ConfigError: it is written otherwise.
    """
    slo = {}
    for part in parts:
        name, _, limit = part.partition(":")
        try:
            slo[name] = float(limit) / 1e3
        except ValueError:
            slo[name] = 0.0
        if name not in MEASURES or slo[name] <= 0:
            raise ConfigError(f"--slo has {part[:40]!r}: give {', '.join(MEASURES)} with milliseconds, as ttft:500")
    return slo


def meets(timing: Timing, slo: dict[str, float]) -> bool:
    """Whether every promised latency was kept."""
    return all(getattr(timing, name) <= limit for name, limit in slo.items())


def goodput(timings: Sequence[Timing], slo: dict[str, float], seconds: float) -> float:
    """Requests per second of a run of so many seconds that kept the promise."""
    return sum(meets(timing, slo) for timing in timings) / seconds
