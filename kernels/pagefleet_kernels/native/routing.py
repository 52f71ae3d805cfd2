"""Which experts each row goes to, on a CPU, in one call.

Shapes: T rows, E experts, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.library import Library, Routing

Scoring = Literal["softmax", "sigmoid"]

_SCORINGS: Mapping[Scoring, int] = {"softmax": 0, "sigmoid": 1}
_LOGITS_PER_THREAD = 1 << 12
"""That one thread goes through sooner than another wakes."""


class NativeRouter:
    """Chooses by a router's logits."""

    __slots__ = ("_correction_E", "_how", "_library")

    def __init__(
        self,
        library: Library,
        num_experts: int,
        top_k: int,
        scoring: Scoring,
        *,
        renormalize: bool,
        scale: float,
        groups: tuple[int, int, int],
        correction_E: Tensor | None = None,
    ) -> None:
        """`groups`: how many there are, how many of them a row may choose from, and how many best experts rank one.
        `correction_E`: float32, added to scores for the choice alone. At most `library.most_experts`."""
        self._library = library
        self._correction_E = None if correction_E is None else correction_E.contiguous()
        num_groups, top_groups, best_of_group = groups
        self._how = Routing(
            correction=None if self._correction_E is None else self._correction_E.data_ptr(),
            num_experts=num_experts,
            top_k=top_k,
            scoring=_SCORINGS[scoring],
            renormalize=renormalize,
            num_groups=num_groups,
            top_groups=top_groups,
            best_of_group=best_of_group,
            scale=scale,
        )

    def __call__(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, K], and experts, int32 [T, K], the best first. A row without numbers goes somewhere."""
        logits_TE = logits_TE if logits_TE.dtype in DTYPES else logits_TE.to(torch.float32)
        if logits_TE.dim() != 2 or logits_TE.shape[1] != self._how.num_experts or logits_TE.stride(1) != 1:
            raise UnsupportedShapeError(f"logits {list(logits_TE.shape)} are not rows of {self._how.num_experts}")
        num_rows, top_k = logits_TE.shape[0], self._how.top_k
        weights_TK = torch.empty((num_rows, top_k), dtype=torch.float32)
        experts_TK = torch.empty((num_rows, top_k), dtype=torch.int32)
        threads = min(torch.get_num_threads(), 1 + logits_TE.numel() // _LOGITS_PER_THREAD)
        self._library.route(
            self._how,
            logits_TE.data_ptr(),
            logits_TE.stride(0),
            num_rows,
            weights_TK.data_ptr(),
            experts_TK.data_ptr(),
            logits_TE.dtype == torch.bfloat16,
            threads,
        )
        return weights_TK, experts_TK
