"""How work is shared out among the steps of a pipeline, of which as many are in flight as there are stages.

A stage that has nothing to do waits for the others. So no step takes more than its part: of the rows that decode, which
come back as a batch one pass later, and of the prompts, where one step for all would have one stage work at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.core.request import Request

FEWEST_TOKENS = 256
"""Of prompts in a step, where there are so many: one of fewer takes hardly less time, as it reads all weights."""


@dataclass(frozen=True, slots=True)
class StepStyle:
    """How steps are computed, where that decides what is in one."""

    cascade: bool = False
    """Attention computes the blocks once that all rows of a step share, so that these are counted."""
    num_stages: int = 1
    """That a step passes through, one behind another; no request is in two steps that sample it."""


PLAIN = StepStyle()


@dataclass(frozen=True, slots=True)
class Share:
    """What one step may take."""

    num_decoding: int
    """Rows of one token."""
    num_tokens: int


def share_out(running: Sequence[Request], num_queued_tokens: int, num_stages: int, budget: int) -> Share:
    """One step's part of what there is to do: of `running` requests, in steps or not, and of the queue.

    `budget`: tokens of the largest step.
    """
    behind = [len(request.token_ids) + request.num_pending - request.num_computed_tokens for request in running]
    num_decoding = sum(tokens <= 1 for tokens in behind)
    num_prompt_tokens = num_queued_tokens + sum(behind) - num_decoding
    return Share(part_of(num_decoding, num_stages), prompt_part(num_prompt_tokens, num_stages, budget, len(running)))


def part_of(number: int, num_stages: int) -> int:
    """Return the least that each of so many steps can take at most, and all of it be taken.

    Of rows that come back each takes as much again: whoever is left over goes with a step that has room, and within as
    many steps as there are stages everyone goes once.
    """
    return -(-number // num_stages)


def prompt_part(num_tokens: int, num_stages: int, budget: int, num_running: int) -> int:
    """Return the tokens of a step, those for one of each running request besides."""
    return min(budget, max(FEWEST_TOKENS, part_of(num_tokens, num_stages)) + num_running)
