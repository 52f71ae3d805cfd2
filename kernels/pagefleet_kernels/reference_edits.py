"""The twins of `sampling_edits`; on the CPU the penalties touch only tokens that a row has seen, not its vocabulary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pagefleet_kernels.sampling_edits import BadWords, History, ListedTokens, Penalties

NEGATIVE_INFINITY = float("-inf")


def edit_listed(logits_RV: Tensor, listed: ListedTokens) -> Tensor:
    """Twin of `sampling_edits.edit_listed`."""
    out_RV = logits_RV.float().contiguous()
    flat = out_RV.view(-1)
    edited_N = flat[listed.index_N].add_(listed.bias_N)
    edited_N.masked_fill_(listed.bias_N == NEGATIVE_INFINITY, NEGATIVE_INFINITY)
    if len(listed.restricted_Q):
        out_RV.index_fill_(0, listed.restricted_Q, NEGATIVE_INFINITY)
    flat[listed.index_N] = edited_N
    return out_RV


def ban_bad_words_(logits_RV: Tensor, bad: BadWords, history: History) -> None:
    """Twin of `sampling_edits.ban_bad_words_`."""
    longest = bad.words_WM.shape[1]
    place_WM = history.lens_R[bad.row_W].unsqueeze(1) - torch.arange(1, longest, device=logits_RV.device)
    known_WM = place_WM >= bad.prompt_len_W.unsqueeze(1)
    held_WM = history.tokens_SL[history.slots_R[bad.row_W].unsqueeze(1), place_WM.clamp_(min=0)]
    words_WM = bad.words_WM[:, 1:]
    begun_W = ((known_WM & (held_WM == words_WM)) | (words_WM < 0)).all(1)
    flat_W = bad.row_W * logits_RV.shape[1] + bad.words_WM[:, 0]
    # words that end alike share an entry of the logits, which any of them bans
    bound_W = torch.where(begun_W, NEGATIVE_INFINITY, math.inf)
    logits_RV.view(-1).scatter_reduce_(0, flat_W, bound_W, "amin")


def penalise_(logits_RV: Tensor, penalties: Penalties, counts_PV: Tensor, history: History, most: int) -> None:
    """Twin of `sampling_edits.penalise_`."""
    row_E1 = penalties.row_E.unsqueeze(1)
    last_E = (history.lens_R[penalties.row_E] - 1).clamp_(max=history.tokens_SL.shape[1] - 1)
    at_EM = penalties.first_E.unsqueeze(1) + torch.arange(most, device=logits_RV.device)
    at_EM = at_EM.clamp_(max=last_E.unsqueeze(1))
    token_EM = history.tokens_SL[history.slots_R[row_E1], at_EM]
    # a token that a row knows twice is read and written twice, to the same value
    count_EM = counts_PV[penalties.count_row_E.unsqueeze(1), token_EM]
    x_EM = logits_RV[row_E1, token_EM]
    repetition, presence, frequency = penalties.weights_3E.unsqueeze(2)
    num_output = (count_EM >> 1).float()
    scaled = torch.where(x_EM > 0, x_EM / repetition, x_EM * repetition)
    penalised = scaled - (presence * (num_output > 0) + frequency * num_output)
    logits_RV[row_E1, token_EM] = torch.where(count_EM > 0, penalised, x_EM)
