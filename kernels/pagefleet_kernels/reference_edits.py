"""The twins of `sampling_edits`; on the CPU the penalties touch only tokens that a row has seen, not its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
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
    if len(listed.restricted_Q):
        out_RV.index_fill_(0, listed.restricted_Q, NEGATIVE_INFINITY)
    flat[listed.index_N] = edited_N
    return out_RV


def ban_bad_words_(logits_RV: Tensor, bad: BadWords, history: History) -> None:
    """Twin of `sampling_edits.ban_bad_words_`."""
    words, rows = bad.words_WM.cpu().numpy(), bad.row_W.cpu().numpy()
    place = history.lens_R.cpu().numpy()[rows, None] - np.arange(1, words.shape[1])
    known = place >= bad.prompt_len_W.cpu().numpy()[:, None]
    slots = history.slots_R.cpu().numpy()[rows]
    held = history.tokens_SL.cpu().numpy()[slots[:, None], np.maximum(place, 0)]
    begun = ((known & (held == words[:, 1:])) | (words[:, 1:] < 0)).all(1)
    flat = rows[begun] * logits_RV.shape[1] + words[begun, 0]
    logits_RV.view(-1).index_fill_(0, torch.from_numpy(flat).to(logits_RV.device), NEGATIVE_INFINITY)


def penalise_(logits_RV: Tensor, penalties: Penalties, counts_PV: Tensor, history: History, most: int) -> None:
    """Twin of `sampling_edits.penalise_`."""
    rows, first = penalties.row_E.cpu().numpy(), penalties.first_E.cpu().numpy()
    tokens, slots = history.tokens_SL.cpu().numpy(), history.slots_R.cpu().numpy()[rows]
    last = np.minimum(history.lens_R.cpu().numpy()[rows], tokens.shape[1]) - 1
    place = np.minimum(first[:, None] + np.arange(most), last[:, None])
    # a token that a row knows twice is read and written twice, to the same value
    token = tokens.reshape(-1).take(slots[:, None] * tokens.shape[1] + place)
    count_row = penalties.count_row_E.cpu().numpy()[:, None]
    count = counts_PV.cpu().numpy().reshape(-1).take(count_row * counts_PV.shape[1] + token)
    flat = rows[:, None] * logits_RV.shape[1] + token
    on_host = logits_RV.cpu()
    logits = on_host.numpy().reshape(-1)
    x = logits.take(flat)
    repetition, presence, frequency = penalties.weights_3E.cpu().numpy()[:, :, None]
    num_output = (count >> 1).astype(np.float32)
    scaled = np.where(x > 0, x / repetition, x * repetition)
    penalised = scaled - (presence * (num_output > 0) + frequency * num_output)
    logits[flat] = np.where(count > 0, penalised, x)
    if on_host is not logits_RV:
        logits_RV.copy_(on_host)
