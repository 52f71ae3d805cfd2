"""What the simulated clients ask for. Prompts are lists of block keys: an equal key means equal tokens up to there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 64
"""Tokens of a block. All lengths are whole blocks."""


@dataclass(slots=True, eq=False)
class Job:
    """One request, and what became of it."""

    blocks: Sequence[int]
    """Of the prompt."""
    num_output: int
    answer: Sequence[int] = ()
    """Blocks of the answer, which the prompt of a next turn holds too."""
    session: int | None = None
    then: Job | None = None
    """The next turn."""
    think: float = 0.0
    """Seconds from the end of this one to the next turn."""
    sent_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    engine: int = -1
    num_hit: int = 0
    """Tokens that the engine had cached when it began."""
    num_computed: int = 0
    """Blocks of the prompt that are there."""
    num_lost: int = 0
    """Tokens generated before a preemption, which are prompt to the engine afterwards."""
    finish_step: int = -1
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return len(self.blocks) * BLOCK
