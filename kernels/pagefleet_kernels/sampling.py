"""One token per row of logits, on the device: greedy, or by Gumbel-max without a softmax and without a sort.

The vocabulary is cut into blocks, so that one row fills a GPU; a second kernel joins the blocks. Rows with top-k, top-p
or min-p are drawn by `sampling_truncation`. A row's token depends on its own logits, seed and length alone.

Shapes: R rows, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_kernels import reference_sampling
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.sampling_noise import gumbel_noise
from pagefleet_kernels.sampling_record import TokenRecord, record_token
from pagefleet_kernels.sampling_rows import SamplingRows, VocabularyPart
from pagefleet_kernels.sampling_truncation import draw_truncated, vocabulary_block

_NUM_WARPS = 8


def sample_tokens(
    logits_RV: Tensor,
    rows: SamplingRows,
    lens_R: Tensor,
    record: TokenRecord,
    *,
    part: VocabularyPart | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Draw a token per row; int32 [R], NOT_NUMBERS or NOTHING_LEFT where there is none (then nothing is recorded).

    The first of equal maxima wins. Never waits for the device.

    Args:
        logits_RV: any float type, rows contiguous; the twin may write into it.
        rows: what the rows ask for.
        lens_R: int32, tokens that each row knows.
        record: where the tokens go.
        part: of the vocabulary, where the logits are those of one rank's tokens; no row may be truncated then.
    """
    num_rows, width = logits_RV.shape
    widths, first_token = ((width,), 0) if part is None else (part.widths, part.first_token)
    if part is not None and rows.any_truncated:
        raise UnsupportedShapeError("top-k, top-p and min-p need the logits of all tokens on each rank")
    if logits_RV.stride(1) != 1 or record.tokens_SL.stride(1) != 1:
        raise UnsupportedShapeError("rows of logits and of tokens must be contiguous")
    if not num_rows == len(rows) == len(lens_R) == len(record.slots_R):
        raise UnsupportedShapeError(
            f"{num_rows} rows of logits need as many parameters, lengths and slots, "
            f"not {len(rows)}, {len(lens_R)} and {len(record.slots_R)}"
        )
    if choose_backend(logits_RV.device, backend) == "torch":
        if part is None:
            token_R = reference_sampling.sample_tokens(logits_RV, rows, lens_R)
        else:
            token_R = reference_sampling.sample_part(logits_RV, rows, lens_R, part)
        reference_sampling.record_tokens(token_R, lens_R, record)
        return token_R
    token_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    if num_rows == 0:
        return token_R
    block = vocabulary_block(logits_RV.device)
    blocks = [-(-tokens // block) for tokens in widths]
    num_blocks = -(-width // block)
    maxima_2RB = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits_RV.device)
    place_RB = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits_RV.device)
    best_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    _block_maxima_kernel[(num_rows, num_blocks)](
        maxima_2RB,
        place_RB,
        logits_RV,
        rows.fields,
        rows.fields.view(torch.float64),
        lens_R,
        logits_RV.stride(0),
        num_rows,
        width,
        first_token,
        RANDOM=rows.any_random,
        BLOCK=block,
        num_warps=_NUM_WARPS,
        **COMPILE_OPTIONS,
    )
    if part is not None:
        maxima_2RB, place_RB = part.gather(maxima_2RB, blocks), part.gather(place_RB, blocks)
        num_blocks = sum(blocks)
    _join_blocks_kernel[(num_rows,)](
        token_R,
        best_R,
        maxima_2RB,
        place_RB,
        rows.fields,
        lens_R,
        *record.kernel_arguments(sum(widths)),
        num_rows,
        num_blocks,
        COUNTED=record.counts_PV is not None,
        BLOCKS=next_power_of_2(num_blocks),
        num_warps=1,
        **COMPILE_OPTIONS,
    )
    if rows.any_truncated:
        draw_truncated(token_R, logits_RV, best_R, rows, lens_R, record)
    return token_R


@jit(do_not_specialize=("num_rows", "first_token"))
def _block_maxima_kernel(  # type: ignore[no-untyped-def]
    maxima_ptr,
    place_ptr,
    logits_ptr,
    fields_ptr,
    floats_ptr,
    lens_ptr,
    stride_row,
    num_rows,
    width,
    first_token,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For one row and block: the largest logit (infinity for NaN), the largest noisy score and its token."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = first_token + column
    x = tl.load(logits_ptr + row * stride_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    # NaN compares as false; as infinity it is the maximum and makes the row unusable
    x = tl.where(x <= float("inf"), x, float("inf"))
    best = tl.max(x, axis=0)
    noisy = x
    if RANDOM:
        kind = tl.load(fields_ptr + 2 * num_rows + row)
        if kind == 1:
            seed = tl.load(fields_ptr + row)
            position = tl.load(lens_ptr + row).to(tl.int64) - tl.load(fields_ptr + num_rows + row)
            inverse_temperature = tl.load(floats_ptr + 4 * num_rows + row).to(tl.float32)
            noisy = x * inverse_temperature + gumbel_noise(seed, position, token)
    most = tl.max(noisy, axis=0)
    place = tl.min(tl.where(inside & (noisy == most), token, first_token + width), axis=0)
    out = row * tl.num_programs(1) + block
    tl.store(maxima_ptr + out, best)
    tl.store(maxima_ptr + num_rows.to(tl.int64) * tl.num_programs(1) + out, most)
    tl.store(place_ptr + out, place)


@jit(do_not_specialize=("num_rows",))
def _join_blocks_kernel(  # type: ignore[no-untyped-def]
    token_ptr,
    best_ptr,
    maxima_ptr,
    place_ptr,
    fields_ptr,
    lens_ptr,
    tokens_ptr,
    slots_ptr,
    counts_ptr,
    count_row_ptr,
    stride_slot,
    max_len,
    vocab_size,
    num_rows,
    num_blocks,
    COUNTED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One row: its token, which is recorded; or its largest logit, where it is truncated and its token comes later."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    x = tl.load(maxima_ptr + at, mask=inside, other=float("-inf"))
    noisy = tl.load(maxima_ptr + num_rows.to(tl.int64) * num_blocks + at, mask=inside, other=float("-inf"))
    place = tl.load(place_ptr + at, mask=inside, other=vocab_size)
    best = tl.max(x, axis=0)
    token = tl.min(tl.where(noisy == tl.max(noisy, axis=0), place, vocab_size), axis=0)
    token = tl.where(best == float("inf"), -1, tl.where(best == float("-inf"), -2, token))
    kind = tl.load(fields_ptr + 2 * num_rows + row)
    truncated = (kind == 2) & (token >= 0)
    tl.store(best_ptr + row, tl.where(truncated, best, float("-inf")))
    tl.store(token_ptr + row, token)
    if kind != 2:
        record_token(
            token,
            row,
            lens_ptr,
            tokens_ptr,
            slots_ptr,
            counts_ptr,
            count_row_ptr,
            stride_slot,
            max_len,
            vocab_size,
            COUNTED,
        )
