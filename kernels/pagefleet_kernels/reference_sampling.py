"""The twin of `sampling`: draws on the CPU without noise for tokens that cannot win, and maxima without their places.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pagefleet_kernels.reference_truncation import NEGATIVE_INFINITY, Cuts, cut_candidates, cut_vocabulary
from pagefleet_kernels.sampling_noise import row_keys, spread_token_ids, subtract_log_exponential_
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import NOT_NUMBERS, NOTHING_LEFT, DrawGroup, SamplingRows, VocabularyPart

_ARGMAX_BLOCK = 128
"""Columns whose maximum is taken without its index, which on the CPU is many times quicker."""

_CACHED_SCORES = 1 << 16


def sample_tokens(logits_RV: Tensor, rows: SamplingRows, lens_R: Tensor) -> Tensor:
    """Twin of `sampling.sample_tokens`, without its writes; may write into `logits_RV`."""
    logits_RV = logits_RV.float().contiguous()
    best_R, token_R = row_maxima(logits_RV)
    if rows.any_random:
        keys_R2 = _keys(rows, lens_R)
        spread_ids_V = _spread_vocabulary(logits_RV.shape[1], logits_RV.device)
        for group in rows.groups:
            whole = len(group.rows_R) == len(rows)
            scores_RV = logits_RV if whole else logits_RV.index_select(0, group.rows_R)
            scores_RV.sub_(best_R[group.rows_R].unsqueeze(1)).mul_(group.inverse_temperature_R1)
            token_R[group.rows_R] = draw(scores_RV, keys_R2[group.rows_R], spread_ids_V, group)
    finite_R = np.isfinite(best_R.cpu().numpy())
    if not finite_R.all():
        token_R[~torch.from_numpy(finite_R)] = NOT_NUMBERS
        token_R[best_R == NEGATIVE_INFINITY] = NOTHING_LEFT
    return token_R.to(torch.int32)


def sample_part(logits_RW: Tensor, rows: SamplingRows, lens_R: Tensor, part: VocabularyPart) -> Tensor:
    """As `sample_tokens`, with the logits of one rank's W tokens; every rank gets every token, from a few numbers each.

    Scores are those that one rank with all logits would give, so that the same tokens win.
    """
    logits_RW = logits_RW.float().contiguous()
    best_R, token_R = row_maxima(logits_RW)
    best = score_R = best_R
    if rows.any_random:
        best = part.gather(best_R.unsqueeze(1), (1,) * len(part.widths)).amax(1)
        score_R = best_R.clone()
        keys_R2 = _keys(rows, lens_R)
        own = slice(part.first_token, part.first_token + logits_RW.shape[1])
        spread_ids_W = _spread_vocabulary(sum(part.widths), logits_RW.device)[own]
        for group in rows.groups:
            at = group.rows_R
            scores_RW = logits_RW[at].sub_(best[at].unsqueeze(1)).mul_(group.inverse_temperature_R1)
            score_R[at], token_R[at] = subtract_log_exponential_(scores_RW, spread_ids_W, keys_R2[at]).max(1)
    found_R2 = torch.stack((score_R.double(), (token_R + part.first_token).double()), -1)
    found_RP2 = part.gather(found_R2, (2,) * len(part.widths)).view(len(rows), -1, 2)
    scores_RP, tokens_RP = found_RP2.unbind(-1)
    winner_R1 = scores_RP.argmax(1, keepdim=True)  # the first of equals has the smaller tokens
    token_R = tokens_RP.gather(1, winner_R1).squeeze(1).to(torch.int32)
    best = best if rows.any_random else scores_RP.amax(1)
    token_R[~best.isfinite()] = NOT_NUMBERS
    token_R[best == NEGATIVE_INFINITY] = NOTHING_LEFT
    return token_R


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


def record_tokens(token_R: Tensor, lens_R: Tensor, record: TokenRecord) -> None:
    """Twin of the writes of `sampling.sample_tokens`."""
    tokens = record.tokens_SL.cpu()
    token, lens, slots = token_R.cpu().numpy(), lens_R.cpu().numpy(), record.slots_R.cpu().numpy()
    kept = (token >= 0) & (lens < tokens.shape[1])
    tokens.numpy()[slots[kept], lens[kept]] = token[kept]
    _write_back(record.tokens_SL, tokens)
    if record.counts_PV is not None and record.count_row_R is not None:
        counts, rows = record.counts_PV.cpu(), record.count_row_R.cpu().numpy()
        counted = (rows >= 0) & (token >= 0)
        counts.numpy()[rows[counted], token[counted]] += 2
        _write_back(record.counts_PV, counts)


def row_maxima(x_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row and where it stands first; NaN counts as the largest."""
    num_rows, num_columns = x_RV.shape
    num_blocks = num_columns // _ARGMAX_BLOCK
    if x_RV.is_cuda or num_blocks < 2:
        best_R, at_R = x_RV.max(1)
        return best_R, at_R
    covered = num_blocks * _ARGMAX_BLOCK
    blocked = x_RV[:, :covered].view(num_rows, num_blocks, _ARGMAX_BLOCK)
    row = np.arange(num_rows)
    block = blocked.amax(2).numpy().argmax(1)
    at = block * _ARGMAX_BLOCK + blocked.numpy()[row, block].argmax(1)
    best = x_RV.numpy()[row, at]
    if covered < num_columns:
        tail = x_RV.numpy()[:, covered:]
        at_tail = tail.argmax(1)
        best_tail = tail[row, at_tail]
        in_tail = (best_tail > best) | (np.isnan(best_tail) & ~np.isnan(best))
        best, at = np.where(in_tail, best_tail, best), np.where(in_tail, at_tail + covered, at)
    return torch.from_numpy(best), torch.from_numpy(at)


def _write_back(tensor: Tensor, on_host: Tensor) -> None:
    """Where the host is the device both are one."""
    if on_host is not tensor:
        tensor.copy_(on_host)


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


def _keys(rows: SamplingRows, lens_R: Tensor) -> Tensor:
    fields = rows.fields.cpu().numpy()
    positions_R = lens_R.cpu().numpy() - fields[1]
    return torch.from_numpy(row_keys(fields[0].view(np.uint64), positions_R)).to(lens_R.device)


@lru_cache(maxsize=4)
def _spread_vocabulary(vocab_size: int, device: torch.device) -> Tensor:
    return spread_token_ids(torch.arange(vocab_size, device=device))


def _cut_(scores_RC: Tensor, threshold_R: Tensor) -> None:
    scores_RC.masked_fill_(scores_RC < threshold_R.unsqueeze(1), NEGATIVE_INFINITY)
