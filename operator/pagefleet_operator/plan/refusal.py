"""The answer to an InferenceService that cannot be carried out as it is written."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_operator.plan.reasons import Reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """What stands in the way. Nothing that runs is touched because of it."""

    path: str
    """Field that has to change, e.g. `spec.profileRef.name`."""
    reason: Reason
    message: str
    """What is wrong and what to do, without the path."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"
