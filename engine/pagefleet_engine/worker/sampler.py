"""Turns logits into tokens: edits, temperature, min-p, top-k, top-p, one draw per row.

Order as in vLLM. Greedy rows take part in the edits only. Random rows use Gumbel-max with noise keyed by (seed, output
position, token id), so a row's token depends on its own logits and parameters and on nothing else in the batch.

Shapes: S rows that sample, R of them in a group, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.core.step import NewRow, TokenLogprobs
from pagefleet_engine.worker.logprobs import describe_tokens
from pagefleet_engine.worker.noise import row_keys, spread_token_ids, subtract_log_exponential_
from pagefleet_engine.worker.sampling_table import DrawGroup, SamplingTable
from pagefleet_engine.worker.truncation import NEGATIVE_INFINITY, Cuts, cut_candidates, cut_vocabulary

NOT_NUMBERS = -1
NOTHING_LEFT = -2

_ARGMAX_BLOCK = 128
"""Columns whose maximum is taken without its index, which on the CPU is many times quicker."""


_CACHED_SCORES = 1 << 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry per row of the logits."""

    token_ids: list[int]
    """NOT_NUMBERS where the logits hold NaN or infinity, NOTHING_LEFT where no token may be taken."""
    logprobs: dict[int, TokenLogprobs]
    """Row -> log-probabilities, for rows that ask and have a token."""


class Sampler:
    """Samples for the requests in its slots."""

    def __init__(self, num_slots: int, vocab_size: int, engine_seed: int, device: torch.device) -> None:
        self._table = SamplingTable(num_slots, vocab_size, engine_seed, device)
        self._device = device
        self._spread_ids_V = spread_token_ids(torch.arange(vocab_size, device=device))

    def add(self, slot: int, new: NewRow) -> None:
        """A request enters."""
        self._table.add(slot, new)

    def remove(self, slot: int) -> None:
        """A request leaves."""
        self._table.remove(slot)

    def append(self, slots_R: NDArray[np.int64], token_ids: list[int]) -> None:
        """These slots' outputs have grown by one token each."""
        self._table.append(slots_R, token_ids)

    def sample(self, logits_SV: Tensor, slots_S: NDArray[np.int64]) -> Sampled:
        """Draw a token for each row. May write into `logits_SV` (any float type)."""
        batch = self._table.batch(slots_S)
        raw_LV = None
        if len(batch.logprob_rows):
            rows = torch.from_numpy(batch.logprob_rows).to(self._device)
            raw_LV = logits_SV.index_select(0, rows).float()
        logits_SV = logits_SV.float().contiguous()
        if batch.edits is not None:
            batch.edits.apply_(logits_SV)
        best_S, token_S = row_maxima(logits_SV)
        for group in batch.groups:
            self._draw(group, logits_SV, best_S, token_S, slots_S)
        failure_S = torch.where(best_S == NEGATIVE_INFINITY, NOTHING_LEFT, NOT_NUMBERS)
        token_ids: list[int] = torch.where(best_S.isfinite(), token_S, failure_S).tolist()
        if raw_LV is None:
            return Sampled(token_ids, {})
        return Sampled(token_ids, _logprobs(raw_LV, token_ids, batch.logprob_rows.tolist(), batch.num_top))

    def _draw(
        self, group: DrawGroup, logits_SV: Tensor, best_S: Tensor, token_S: Tensor, slots_S: NDArray[np.int64]
    ) -> None:
        """Replace the group's entries of `token_S` by draws."""
        scores_RV = logits_SV if len(group.rows) == len(slots_S) else logits_SV.index_select(0, group.rows_R)
        scores_RV.sub_(best_S[group.rows_R].unsqueeze(1)).mul_(group.inverse_temperature_R1)
        seeds, positions = self._table.seeds_and_positions(slots_S[group.rows])
        keys_R2 = torch.from_numpy(row_keys(seeds, positions)).to(self._device)
        token_S[group.rows_R] = draw(scores_RV, keys_R2, self._spread_ids_V, group)


def draw(scores_RV: Tensor, keys_R2: Tensor, spread_ids_V: Tensor, group: DrawGroup) -> Tensor:
    """Draw a token per row [R] from scores whose maximum is 0; overwrites the scores."""
    if group.num_candidates is None:
        return _draw_from_all(scores_RV, keys_R2, spread_ids_V, group.cuts, sort=group.by_top_k)
    values_RC, ids_RC = scores_RV.topk(min(group.num_candidates, scores_RV.shape[1]), dim=1)
    threshold_R, complete_R = cut_candidates(scores_RV, values_RC, group.cuts, by_top_k=group.by_top_k)
    _cut_(values_RC, threshold_R)
    place_R = subtract_log_exponential_(values_RC, spread_ids_V[ids_RC], keys_R2).argmax(1)
    token_R = ids_RC.gather(1, place_R.unsqueeze(1)).squeeze(1)
    left = (~complete_R).nonzero().squeeze(1)
    if len(left):
        cuts = group.cuts.select(left)
        token_R[left] = _draw_from_all(scores_RV[left], keys_R2[left], spread_ids_V, cuts, sort=True)
    return token_R


def _draw_from_all(scores_RV: Tensor, keys_R2: Tensor, spread_ids_V: Tensor, cuts: Cuts, *, sort: bool) -> Tensor:
    """As `draw`, with noise for the whole vocabulary. `sort`: there may be a top-k or top-p, else only min-p.

    On the CPU a few rows at a time, whose intermediates the cache can hold.
    """
    num_rows, num_columns = scores_RV.shape
    at_once = num_rows if scores_RV.is_cuda else max(1, _CACHED_SCORES // num_columns)
    tokens = []
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        scores = scores_RV[part]
        _cut_(scores, cut_vocabulary(scores, cuts.select(part)) if sort else cuts.log_min_p_R[part])
        tokens.append(subtract_log_exponential_(scores, spread_ids_V, keys_R2[part]).argmax(1))
    return torch.cat(tokens)


def row_maxima(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row and where it stands first; NaN counts as the largest."""
    num_rows, num_columns = x_SV.shape
    num_blocks = num_columns // _ARGMAX_BLOCK
    if x_SV.is_cuda or num_blocks < 2:
        best_S, at_S = x_SV.max(1)
        return best_S, at_S
    covered = num_blocks * _ARGMAX_BLOCK
    blocked = x_SV[:, :covered].view(num_rows, num_blocks, _ARGMAX_BLOCK)
    best_S, block_S = blocked.amax(2).max(1)
    within_S = blocked[torch.arange(num_rows), block_S].argmax(1)
    at_S = block_S.mul_(_ARGMAX_BLOCK).add_(within_S)
    if covered == num_columns:
        return best_S, at_S
    tail_best_S, tail_at_S = x_SV[:, covered:].max(1)
    in_tail_S = (tail_best_S > best_S) | (tail_best_S.isnan() & ~best_S.isnan())
    return torch.where(in_tail_S, tail_best_S, best_S), torch.where(in_tail_S, tail_at_S + covered, at_S)


def _cut_(scores_RC: Tensor, threshold_R: Tensor) -> None:
    scores_RC.masked_fill_(scores_RC < threshold_R.unsqueeze(1), NEGATIVE_INFINITY)


def _logprobs(
    raw_LV: Tensor, token_ids: list[int], rows: list[int], num_top: tuple[int, ...]
) -> dict[int, TokenLogprobs]:
    chosen = [max(token_ids[row], 0) for row in rows]
    entries = describe_tokens(raw_LV, chosen, num_top)
    return {row: entry for row, entry in zip(rows, entries, strict=True) if token_ids[row] >= 0}
