"""Which tokens a request has seen, and how often it has put them out: what penalties are computed from.

Sparse, because a dense count per request would make each penalised row touch the whole vocabulary several times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct tokens of one request, in the order they came, with their counts in the output."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """`prompt_ids`: tokens that count as seen but not as output; ids that are penalised only by output: none."""
        distinct = dict.fromkeys(prompt_ids)
        self._place = {token: place for place, token in enumerate(distinct)}
        capacity = max(64, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._ids[: len(distinct)] = list(distinct)

    def append(self, token_id: int) -> None:
        """Count one output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct tokens seen; a view."""
        return self._ids[: len(self._place)]

    @property
    def output_counts(self) -> NDArray[np.int32]:
        """How often each of `token_ids` stands in the output; a view."""
        return self._counts[: len(self._place)]
