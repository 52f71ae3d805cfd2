"""Log-probabilities of the model's own distribution, before any sampling parameter changes it.

Shapes: L rows, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagefleet_engine.core.step import TokenLogprobs


def describe_tokens(logits_LV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token of each row, its rank, and the `num_top` most likely (the chosen one may be among them).

    Args:
        logits_LV: unmodified logits; float32.
        token_ids: L tokens.
        num_top: L counts of at least 0.
    """
    logprobs_LV = torch.log_softmax(logits_LV, dim=1)
    tokens_L1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_LV.device).unsqueeze(1)
    chosen_L1 = logprobs_LV.gather(1, tokens_L1)
    ranks: list[int] = (logprobs_LV > chosen_L1).sum(1).add_(1).tolist()
    most = min(max(num_top, default=0), logits_LV.shape[1])
    values_LK, ids_LK = logprobs_LV.topk(most, dim=1)
    values: list[list[float]] = torch.cat([chosen_L1, values_LK], dim=1).tolist()
    ids: list[list[int]] = torch.cat([tokens_L1, ids_LK], dim=1).tolist()
    return [
        TokenLogprobs(ids[row][: 1 + k], values[row][: 1 + k], rank)
        for row, (k, rank) in enumerate(zip(num_top, ranks, strict=True))
    ]
