"""What the rows of one batch ask of sampling, on the host (to choose kernels) and on the device (for them to read).

Made once per set of rows and kept while the rows stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_kernels.reference_truncation import Cuts, num_candidates

NOT_NUMBERS = -1
NOTHING_LEFT = -2

NUM_FIELDS = 7
"""Rows of `SamplingRows.fields`, in this order: seed, prompt length, kind, top-k as int64, then 1 / temperature, top-p
and the logarithm of min-p as float64. The kernels name them by number."""


class DrawKind(IntEnum):
    """How a row gets its token; the kernels name the kinds by number."""

    GREEDY = 0
    PLAIN = 1
    TRUNCATED = 2
    """At random, after top-k, top-p or min-p."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """One entry per row, on the host.

    `top_k` 0, `top_p` 1 and `log_min_p` -inf are off; rows with temperature 0 are greedy.
    """

    seed: NDArray[np.uint64]
    prompt_len: NDArray[np.int64]
    """Tokens before the first that is drawn: the noise is keyed by the place in the output."""
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    log_min_p: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows of a batch that the twin draws together; R of them."""

    rows_R: Tensor
    """int64, into the batch."""
    num_candidates: int | None
    by_top_k: bool
    inverse_temperature_R1: Tensor
    cuts: Cuts


class SamplingRows:
    """Parameters of the rows of a batch."""

    def __init__(self, parameters: RowParameters, device: torch.device) -> None:
        """`parameters` must not be written afterwards."""
        p = parameters
        random = p.temperature > 0.0
        truncated = random & ((p.top_k > 0) | (p.top_p < 1.0) | (p.log_min_p > -np.inf))
        self._parameters = p
        self._device = device
        self._random = random
        self.any_random = bool(random.any())
        """Some row draws at random."""
        self.any_truncated = bool(truncated.any())
        """Some row has top-k, top-p or min-p."""
        fields = np.empty((NUM_FIELDS, len(random)), dtype=np.int64)
        fields[0] = p.seed.view(np.int64)
        fields[1] = p.prompt_len
        fields[2] = np.where(truncated, DrawKind.TRUNCATED, np.where(random, DrawKind.PLAIN, DrawKind.GREEDY))
        fields[3] = p.top_k
        floats = fields.view(np.float64)
        floats[4] = np.divide(1.0, p.temperature, out=np.ones_like(p.temperature), where=random).astype(np.float32)
        floats[5] = p.top_p
        floats[6] = p.log_min_p
        self.fields = send(fields, device)
        """int64 [NUM_FIELDS, R]; floats by their bits."""

    def __len__(self) -> int:
        return len(self._random)

    @cached_property
    def groups(self) -> tuple[DrawGroup, ...]:
        """For the twin: every row that is not greedy is in exactly one, by its own parameters alone."""
        p = self._parameters
        keys = np.full(len(self), -1, dtype=np.int64)
        for row in np.flatnonzero(self._random):
            keys[row] = _draw_key(int(p.top_k[row]), float(p.top_p[row]))
        return tuple(self._group(np.flatnonzero(keys == key), int(key)) for key in np.unique(keys[keys >= 0]))

    def _group(self, rows: NDArray[np.int64], key: int) -> DrawGroup:
        p, size = self._parameters, key // 2
        return DrawGroup(
            rows_R=send(rows, self._device),
            num_candidates=size or None,
            by_top_k=bool(key % 2),
            inverse_temperature_R1=send((1.0 / p.temperature[rows]).astype(np.float32), self._device).unsqueeze(1),
            cuts=Cuts(
                top_k_R=send(p.top_k[rows], self._device),
                top_p_R=send(p.top_p[rows], self._device),
                log_min_p_R=send(p.log_min_p[rows], self._device),
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """The tokens that one rank has logits of; ranks have consecutive ranges of the vocabulary, in their order."""

    widths: tuple[int, ...]
    """Tokens of each rank."""
    index: int
    """Which of them this is."""
    gather: Callable[[Tensor, Sequence[int]], Tensor]
    """Joins the last dimension of all ranks' tensors, which are so wide each."""

    @property
    def first_token(self) -> int:
        """The first of this rank's."""
        return sum(self.widths[: self.index])


def send(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on a device, without a wait; on the CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _draw_key(top_k: int, top_p: float) -> int:
    """Rows of one key draw together: 2 * candidates (0: the whole vocabulary) + (1 where a top-k limits them)."""
    return 2 * (num_candidates(top_k, top_p) or 0) + (top_k > 0)
