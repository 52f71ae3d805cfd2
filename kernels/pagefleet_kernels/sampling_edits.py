"""Changes to logits before a token is drawn: listed ids, begun bad words, penalties.

Counts are one int32 per slot and token: 2 * (times in the output) + (1 where the prompt holds it and that matters).

Shapes: R rows, V vocabulary, N listed ids, Q rows that are restricted, W words, M longest word, E penalised rows,
S slots, L tokens per slot, P rows of counts. A flat index is row * V + token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.tuning import launch_table

_WORD_TILE = 16
"""Words up to this length run one kernel, which is compiled before anyone asks for it."""


NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class ListedTokens:
    """Ids that are allowed, biased or banned whatever was put out so far."""

    index_N: Tensor
    """int64, flat, distinct."""
    bias_N: Tensor
    """float32; -inf bans (infinity is not made a number by it)."""
    restricted_Q: Tensor
    """int64, rows that may take none but their listed ids."""


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Words of several tokens: the last is banned where the others stand at the end of the output."""

    words_WM: Tensor
    """int32, each word backwards, then -1."""
    row_W: Tensor
    """int64, row in the logits."""
    prompt_len_W: Tensor
    """int64: tokens before these never begin a word."""


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows with penalties. Repetition divides what is positive and multiplies what is not; the others subtract."""

    row_E: Tensor
    """int64, row in the logits."""
    count_row_E: Tensor
    """int64, row in the counts."""
    first_E: Tensor
    """int64, place of the first token that can have a count."""
    weights_3E: Tensor
    """float32, contiguous: repetition, presence, frequency."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The tokens that the rows know."""

    tokens_SL: Tensor
    """int32."""
    slots_R: Tensor
    """int64."""
    lens_R: Tensor
    """int32."""


def edit_listed(logits_RV: Tensor, listed: ListedTokens, *, backend: Backend | None = None) -> Tensor:
    """Logits with the lists applied; float32, contiguous. The twin may write into `logits_RV`."""
    if choose_backend(logits_RV.device, backend) == "torch":
        return _edit_listed_by_torch(logits_RV, listed)
    num_rows, vocab_size = logits_RV.shape
    out_RV = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits_RV.device).copy_(logits_RV)
    out_RV.index_fill_(0, listed.restricted_Q, float("-inf"))
    num_listed = len(listed.index_N)
    if num_listed:
        block = _block(logits_RV.device)
        _listed_kernel[(-(-num_listed // block),)](
            out_RV,
            logits_RV,
            listed.index_N,
            listed.bias_N,
            logits_RV.stride(0),
            logits_RV.stride(1),
            num_listed,
            VOCAB=vocab_size,
            BLOCK=block,
            **COMPILE_OPTIONS,
        )
    return out_RV


def ban_bad_words_(logits_RV: Tensor, bad: BadWords, history: History, *, backend: Backend | None = None) -> None:
    """Set the last token of every begun word to -inf; `logits_RV` float32, contiguous."""
    if choose_backend(logits_RV.device, backend) == "torch":
        _ban_bad_words_by_torch(logits_RV, bad, history)
        return
    num_words, longest = bad.words_WM.shape
    _bad_words_kernel[(num_words,)](
        logits_RV,
        bad.words_WM,
        bad.row_W,
        bad.prompt_len_W,
        history.tokens_SL,
        history.slots_R,
        history.lens_R,
        history.tokens_SL.stride(0),
        longest,
        VOCAB=logits_RV.shape[1],
        WIDTH=max(_WORD_TILE, next_power_of_2(longest)),
        num_warps=1,
        **COMPILE_OPTIONS,
    )


def penalise_(
    logits_RV: Tensor,
    penalties: Penalties,
    counts_PV: Tensor,
    history: History,
    most: int,
    *,
    backend: Backend | None = None,
) -> None:
    """Apply the penalties; `logits_RV` float32 and `counts_PV` int32, both contiguous.

    No row has more than `most` tokens from its first on; the twin looks at so many.
    """
    if choose_backend(logits_RV.device, backend) == "torch":
        _penalise_by_torch(logits_RV, penalties, counts_PV, history, most)
        return
    num_penalised, vocab_size = len(penalties.row_E), logits_RV.shape[1]
    block = _block(logits_RV.device)
    _penalties_kernel[(num_penalised, -(-vocab_size // block))](
        logits_RV,
        counts_PV,
        penalties.row_E,
        penalties.count_row_E,
        penalties.weights_3E,
        num_penalised,
        VOCAB=vocab_size,
        BLOCK=block,
        **COMPILE_OPTIONS,
    )


def _block(device: torch.device) -> int:
    return launch_table(architecture(device)).tile_elements


def _edit_listed_by_torch(logits_RV: Tensor, listed: ListedTokens) -> Tensor:
    """Twin of `edit_listed`."""
    out_RV = logits_RV.float().contiguous()
    flat = out_RV.view(-1)
    edited_N = flat[listed.index_N].add_(listed.bias_N)
    if len(listed.restricted_Q):
        out_RV.index_fill_(0, listed.restricted_Q, NEGATIVE_INFINITY)
    flat[listed.index_N] = edited_N
    return out_RV


def _ban_bad_words_by_torch(logits_RV: Tensor, bad: BadWords, history: History) -> None:
    """Twin of `ban_bad_words_`."""
    words, rows = bad.words_WM.cpu().numpy(), bad.row_W.cpu().numpy()
    place = history.lens_R.cpu().numpy()[rows, None] - np.arange(1, words.shape[1])
    known = place >= bad.prompt_len_W.cpu().numpy()[:, None]
    slots = history.slots_R.cpu().numpy()[rows]
    held = history.tokens_SL.cpu().numpy()[slots[:, None], np.maximum(place, 0)]
    begun = ((known & (held == words[:, 1:])) | (words[:, 1:] < 0)).all(1)
    flat = rows[begun] * logits_RV.shape[1] + words[begun, 0]
    logits_RV.view(-1).index_fill_(0, torch.from_numpy(flat).to(logits_RV.device), NEGATIVE_INFINITY)


def _penalise_by_torch(logits_RV: Tensor, penalties: Penalties, counts_PV: Tensor, history: History, most: int) -> None:
    """Twin of `penalise_`: on the CPU it touches only tokens that a row has seen, not its vocabulary."""
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


@jit(do_not_specialize=("num_listed",))
def _listed_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    logits_ptr,
    index_ptr,
    bias_ptr,
    stride_row,
    stride_token,
    num_listed,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_listed
    index = tl.load(index_ptr + at, mask=mask, other=0)
    bias = tl.load(bias_ptr + at, mask=mask, other=0.0)
    x = tl.load(logits_ptr + (index // VOCAB) * stride_row + (index % VOCAB) * stride_token, mask=mask, other=0.0)
    tl.store(out_ptr + index, x.to(tl.float32) + bias, mask=mask)


@jit(do_not_specialize=("longest",))
def _bad_words_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    words_ptr,
    row_ptr,
    prompt_len_ptr,
    tokens_ptr,
    slots_ptr,
    lens_ptr,
    stride_slot,
    longest,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One word. Its token number i from the end must stand i places before the token to be drawn."""
    word = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + word)
    back = tl.arange(0, WIDTH)
    token = tl.load(words_ptr + word * longest + back, mask=back < longest, other=-1)
    wanted = (back > 0) & (token >= 0)
    place = tl.load(lens_ptr + row).to(tl.int64) - back
    known = wanted & (place >= tl.load(prompt_len_ptr + word))
    held = tl.load(tokens_ptr + tl.load(slots_ptr + row) * stride_slot + place, mask=known, other=-1)
    missing = tl.sum((wanted & (held != token)).to(tl.int32), axis=0)
    last = tl.sum(tl.where(back == 0, token, 0), axis=0)
    tl.store(logits_ptr + row * VOCAB + last, float("-inf"), mask=missing == 0)


@jit(do_not_specialize=("num_penalised",))
def _penalties_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    counts_ptr,
    row_ptr,
    count_row_ptr,
    weights_ptr,
    num_penalised,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    count = tl.load(counts_ptr + tl.load(count_row_ptr + place) * VOCAB + token, mask=inside, other=0)
    if tl.max(count, axis=0) > 0:
        repetition = tl.load(weights_ptr + place)
        presence = tl.load(weights_ptr + num_penalised + place)
        frequency = tl.load(weights_ptr + 2 * num_penalised + place)
        logits_ptr += tl.load(row_ptr + place) * VOCAB
        x = tl.load(logits_ptr + token, mask=inside, other=0.0)
        num_output = (count >> 1).to(tl.float32)
        scaled = tl.where(x > 0.0, x / repetition, x * repetition)
        penalised = scaled - (tl.where(num_output > 0.0, presence, 0.0) + frequency * num_output)
        tl.store(logits_ptr + token, penalised, mask=inside & (count > 0))
