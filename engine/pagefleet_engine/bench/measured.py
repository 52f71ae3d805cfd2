"""What a server did under a load, as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_engine.bench.goodput import Timing, goodput, meets
from pagefleet_engine.bench.load_client import Answer, Failure, Outcome
from pagefleet_engine.bench.percentiles import summary


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, or several of the same kind."""

    answers: Sequence[Answer]
    failures: Counter[str]
    """Requests that were not completed, by the reason."""
    seconds: float
    """Of the runs, one after the other."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seconds: float) -> Measured:
        """One run."""
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        return cls(answers, Counter(one.reason for one in outcomes if isinstance(one, Failure)), seconds)

    def with_more(self, other: Measured) -> Measured:
        """Both, as if one run had followed the other."""
        return Measured([*self.answers, *other.answers], self.failures + other.failures, self.seconds + other.seconds)

    @property
    def timings(self) -> list[Timing]:
        """Of the answers."""
        return [answer.timing for answer in self.answers]

    @property
    def num_output_tokens(self) -> int:
        """Of the answers."""
        return sum(timing.num_output_tokens for timing in self.timings)

    @property
    def latencies_ms(self) -> Mapping[str, list[float]]:
        """Every latency, by measure."""
        timings = self.timings
        return {
            "ttft": [timing.ttft * 1e3 for timing in timings],
            "tpot": [timing.tpot * 1e3 for timing in timings if timing.num_output_tokens > 1],
            "itl": [gap * 1e3 for timing in timings for gap in timing.itl],
            "e2e": [timing.e2e * 1e3 for timing in timings],
        }

    def figures(self, slo: dict[str, float]) -> dict[str, Any]:
        """Keys carry units. Where there were conversations, each turn has figures of its own.

        Args:
            slo: promised seconds by measure; empty: nothing was promised.
        """
        timings, seconds = self.timings, self.seconds
        figures: dict[str, Any] = {
            "completed": len(timings),
            "failed": self.failures.total(),
            "seconds": seconds,
            "requests_per_s": len(timings) / seconds,
            "output_tokens_per_s": self.num_output_tokens / seconds,
            "input_tokens_per_s": sum(timing.num_input_tokens for timing in timings) / seconds,
        }
        figures |= {f"{name}_ms": summary(values) for name, values in self.latencies_ms.items()}
        if slo:
            figures["goodput_requests_per_s"] = goodput(timings, slo, seconds)
            kept = sum(meets(timing, slo) for timing in timings)
            figures["goodput_share"] = kept / (len(timings) + figures["failed"])
        last_turn = max((answer.turn for answer in self.answers), default=1)
        if last_turn > 1:
            figures |= {f"turn_{turn}": self._turn_figures(turn) for turn in range(1, last_turn + 1)}
        if self.failures:
            figures["failures"] = dict(self.failures.most_common(5))
        return figures

    def _turn_figures(self, turn: int) -> Mapping[str, Any]:
        answers = [answer for answer in self.answers if answer.turn == turn]
        timings = [answer.timing for answer in answers]
        input_tokens = sum(timing.num_input_tokens for timing in timings)
        cached = [answer.num_cached_tokens for answer in answers if answer.num_cached_tokens is not None]
        figures: dict[str, Any] = {
            "completed": len(answers),
            "ttft_ms": summary([timing.ttft * 1e3 for timing in timings]),
            "mean_input_tokens": input_tokens / len(answers),
        }
        if cached:
            figures["mean_cached_tokens"] = sum(cached) / len(cached)
            figures["cached_share"] = sum(cached) / input_tokens if input_tokens else 0.0
        # What one asker sees: turns of several conversations overlap, so there is no span that is this turn's alone.
        spent = sum(timing.e2e for timing in timings)
        figures["output_tokens_per_s_per_request"] = sum(timing.num_output_tokens for timing in timings) / spent
        return figures
