"""One thing that keeps a pod from serving."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import one_line

_MAX_QUOTED = 240


@dataclass(frozen=True, slots=True)
class Trouble:
    """What it is, and what to do about it."""

    reason: Reason
    message: str


def quoted(text: str) -> str:
    """Return what another program said, short enough to leave room for what to do; without a full stop at its end."""
    return one_line(text, _MAX_QUOTED).rstrip(".")
