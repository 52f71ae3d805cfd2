"""Draws among the tokens that top-k, top-p and min-p leave, found by searching for a threshold: nothing is sorted.

Scores are (logit - largest logit) / temperature, at most 0. The bits of such a float without its sign, its magnitude,
are an integer that grows as the score falls, so a threshold is an integer and can be bisected exactly.

    measure   per row and block: tokens and mass above each of 16 pivots
    collect   each row's tokens above the narrowest pivot that holds all that can be kept, side by side
    draw      per row: bisect within that list, usually short; then Gumbel-max over what is kept

Tokens of equal score are kept or dropped together; the token that reaches top-p is the last one kept. The sums of a row
are taken in an order of its own, so that its threshold is the same in any batch.

Shapes: R rows, V vocabulary, B blocks of it, J pivots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import architecture
from pagefleet_kernels.sampling_noise import gumbel_noise
from pagefleet_kernels.sampling_record import TokenRecord, record_token
from pagefleet_kernels.sampling_rows import SamplingRows
from pagefleet_kernels.tuning import all_registers

NUM_PIVOTS = 16
MAX_COLLECTED = 1 << 24
"""Tokens that are collected at once, of 8 bytes; more rows take turns."""

_NUM_WARPS = 8


def vocabulary_block(device: torch.device) -> int:
    """Tokens per program; in the interpreter few, so that tests have several blocks."""
    return 128 if architecture(device) == "interpreter" else 4096


def draw_truncated(
    token_R: Tensor, logits_RV: Tensor, best_R: Tensor, rows: SamplingRows, lens_R: Tensor, record: TokenRecord
) -> None:
    """Replace the tokens of truncated rows by draws, and record them.

    `best_R`: the largest logit of each truncated row; -inf where there is nothing to draw.
    """
    num_rows, vocab_size = logits_RV.shape
    block = vocabulary_block(logits_RV.device)
    num_blocks = -(-vocab_size // block)
    at_once = min(num_rows, max(1, MAX_COLLECTED // vocab_size))
    list_2AV = torch.empty((2, at_once, vocab_size), dtype=torch.int32, device=logits_RV.device)
    counts_ABJ = torch.empty((at_once, num_blocks, NUM_PIVOTS), dtype=torch.int32, device=logits_RV.device)
    masses_ABJ = torch.empty_like(counts_ABJ, dtype=torch.float32)
    fields, floats = rows.fields, rows.fields.view(torch.float64)
    options = {"num_warps": _NUM_WARPS, **COMPILE_OPTIONS}
    blocks = next_power_of_2(num_blocks)
    for first in range(0, num_rows, at_once):
        count = min(at_once, num_rows - first)
        scores = (logits_RV, best_R, fields, floats, logits_RV.stride(0), first, num_rows, vocab_size)
        _measure_kernel[(count, num_blocks)](
            counts_ABJ, masses_ABJ, *scores, BLOCK=block, TILE=min(block // 2, 512), PIVOTS=NUM_PIVOTS, **options
        )
        _collect_kernel[(count, num_blocks)](
            list_2AV, counts_ABJ, masses_ABJ, *scores, at_once, BLOCK=block, BLOCKS=blocks, PIVOTS=NUM_PIVOTS, **options
        )
        _draw_kernel[(count,)](
            token_R,
            list_2AV,
            counts_ABJ,
            masses_ABJ,
            best_R,
            fields,
            floats,
            lens_R,
            *record.kernel_arguments(vocab_size),
            first,
            num_rows,
            num_blocks,
            at_once,
            COUNTED=record.counts_PV is not None,
            TILE=min(block // 2, 2048),
            BLOCKS=blocks,
            PIVOTS=NUM_PIVOTS,
            **all_registers(token_R.device),
            **options,
        )


@jit()
def _magnitude(x, best, inverse_temperature):  # type: ignore[no-untyped-def]
    """How far below the best a logit's score is, as an ordered integer; 0x7f800000 for a score of -inf."""
    score = (x - best) * inverse_temperature
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit()
def _score(magnitude):  # type: ignore[no-untyped-def]
    return -(magnitude.to(tl.float32, bitcast=True))


@jit()
def _pivots(log_min_p, PIVOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Magnitudes: first the largest that min-p keeps (without it, of any finite score), then 5/16 up to 285/16.

    The steps are sixteenths, which float32 holds exactly: every kernel computes the same integers.
    """
    step = tl.arange(0, PIVOTS)
    distance = (step * 4 + step * step).to(tl.float32) * 0.0625
    bound = tl.minimum((-log_min_p).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F7FFFFF)
    return tl.where(step == 0, bound, distance.to(tl.int32, bitcast=True))


@jit()
def _choose_pivot(  # type: ignore[no-untyped-def]
    counts_ptr, masses_ptr, top_k, top_p, log_min_p, num_blocks, BLOCKS: tl.constexpr, PIVOTS: tl.constexpr
):
    """Place and magnitude of the narrowest pivot that holds every token that can be kept, and what min-p leaves."""
    block = tl.arange(0, BLOCKS)[:, None]
    step = tl.arange(0, PIVOTS)
    at = block * PIVOTS + step[None, :]
    count = tl.sum(tl.load(counts_ptr + at, mask=block < num_blocks, other=0), axis=0)
    mass = tl.sum(tl.load(masses_ptr + at, mask=block < num_blocks, other=0.0).to(tl.float64), axis=0)
    min_p_mass = tl.sum(tl.where(step == 0, mass, 0.0), axis=0)
    target = tl.where(top_p < 1.0, top_p * min_p_mass, float("inf"))
    enough = tl.where(top_k > 0, count >= top_k, mass >= target) | (step == 0)
    pivot = _pivots(log_min_p, PIVOTS)
    bound = tl.min(tl.where(enough, pivot, 0x7FFFFFFF), axis=0)
    chosen = tl.min(tl.where(enough & (pivot == bound), step, PIVOTS), axis=0)
    return chosen, bound, min_p_mass


@jit(do_not_specialize=("first", "num_rows"))
def _measure_kernel(  # type: ignore[no-untyped-def]
    counts_ptr,
    masses_ptr,
    logits_ptr,
    best_ptr,
    fields_ptr,
    floats_ptr,
    stride_row,
    first,
    num_rows,
    vocab_size,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """For one row and block: how many tokens score at least as high as each pivot, and the sum of exp(score)."""
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    best = tl.load(best_ptr + row)
    if best == float("-inf"):
        return
    inverse_temperature = tl.load(floats_ptr + 4 * num_rows + row).to(tl.float32)
    pivot = _pivots(tl.load(floats_ptr + 6 * num_rows + row).to(tl.float32), PIVOTS)
    count = tl.zeros([PIVOTS], dtype=tl.int32)
    mass = tl.zeros([PIVOTS], dtype=tl.float32)
    start = tl.program_id(1) * BLOCK
    for offset in range(0, BLOCK, TILE):
        token = start + offset + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        magnitude = _magnitude(x, best, inverse_temperature)
        above = magnitude[None, :] <= pivot[:, None]
        weight = tl.exp(_score(magnitude))
        count += tl.sum(above.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(above, weight[None, :], 0.0), axis=1)
    out = (place * tl.num_programs(1) + tl.program_id(1)) * PIVOTS + tl.arange(0, PIVOTS)
    tl.store(counts_ptr + out, count)
    tl.store(masses_ptr + out, mass)


@jit(do_not_specialize=("first", "num_rows", "num_lists"))
def _collect_kernel(  # type: ignore[no-untyped-def]
    list_ptr,
    counts_ptr,
    masses_ptr,
    logits_ptr,
    best_ptr,
    fields_ptr,
    floats_ptr,
    stride_row,
    first,
    num_rows,
    vocab_size,
    num_lists,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """For one row and block: append its tokens above the chosen pivot, in order, to what the blocks before have."""
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    best = tl.load(best_ptr + row)
    if best == float("-inf"):
        return
    num_blocks = tl.num_programs(1)
    block = tl.program_id(1)
    top_k = tl.load(fields_ptr + 3 * num_rows + row)
    top_p = tl.load(floats_ptr + 5 * num_rows + row)
    log_min_p = tl.load(floats_ptr + 6 * num_rows + row).to(tl.float32)
    counts_ptr += place * num_blocks * PIVOTS
    masses_ptr += place * num_blocks * PIVOTS
    chosen, bound, _ = _choose_pivot(counts_ptr, masses_ptr, top_k, top_p, log_min_p, num_blocks, BLOCKS, PIVOTS)
    before = tl.arange(0, BLOCKS)
    start = tl.sum(tl.load(counts_ptr + before * PIVOTS + chosen, mask=before < block, other=0), axis=0)

    inverse_temperature = tl.load(floats_ptr + 4 * num_rows + row).to(tl.float32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    magnitude = _magnitude(x, best, inverse_temperature)
    kept = magnitude <= bound
    at = place * vocab_size + start + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + at, magnitude, mask=kept)
    tl.store(list_ptr + num_lists.to(tl.int64) * vocab_size + at, token, mask=kept)


@jit()
def _bisect(list_ptr, length, bound, wanted, BY_MASS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Smallest magnitude up to which the list holds `wanted` tokens or mass; `bound` if it never does."""
    low = bound * 0 - 1
    high = bound
    while high - low > 1:
        middle = low + (high - low) // 2
        amount = wanted * 0.0
        for start in range(0, length, TILE):
            at = start + tl.arange(0, TILE)
            magnitude = tl.load(list_ptr + at, mask=at < length, other=0x7F800000)
            # calls cost little on a GPU and much in the interpreter, so the score is spelled out in this inner loop
            weight = tl.exp(-(magnitude.to(tl.float32, bitcast=True))) if BY_MASS else (at < length).to(tl.float32)
            amount += tl.sum(tl.where(magnitude <= middle, weight, 0.0), axis=0).to(tl.float64)
        reached = amount >= wanted
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@jit()
def _mass(list_ptr, length, bound, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of exp(score) over the entries of the list up to `bound`; float64."""
    mass = tl.zeros([1], dtype=tl.float64)
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        magnitude = tl.load(list_ptr + at, mask=at < length, other=0x7F800000)
        mass += tl.sum(tl.where(magnitude <= bound, tl.exp(_score(magnitude)), 0.0), axis=0).to(tl.float64)
    return tl.sum(mass, axis=0)


@jit(do_not_specialize=("first", "num_rows", "num_lists"))
def _draw_kernel(  # type: ignore[no-untyped-def]
    token_ptr,
    list_ptr,
    counts_ptr,
    masses_ptr,
    best_ptr,
    fields_ptr,
    floats_ptr,
    lens_ptr,
    tokens_ptr,
    slots_ptr,
    batch_counts_ptr,
    count_row_ptr,
    stride_slot,
    max_len,
    vocab_size,
    first,
    num_rows,
    num_blocks,
    num_lists,
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """One row: find its threshold in the list that was collected, draw from what is above it, record the token."""
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    best = tl.load(best_ptr + row)
    if best == float("-inf"):
        return
    top_k = tl.load(fields_ptr + 3 * num_rows + row)
    top_p = tl.load(floats_ptr + 5 * num_rows + row)
    log_min_p = tl.load(floats_ptr + 6 * num_rows + row).to(tl.float32)
    counts_ptr += place * num_blocks * PIVOTS
    masses_ptr += place * num_blocks * PIVOTS
    chosen, bound, mass = _choose_pivot(counts_ptr, masses_ptr, top_k, top_p, log_min_p, num_blocks, BLOCKS, PIVOTS)
    block = tl.arange(0, BLOCKS)
    length = tl.sum(tl.load(counts_ptr + block * PIVOTS + chosen, mask=block < num_blocks, other=0), axis=0)
    list_ptr += place * vocab_size
    if top_k > 0:
        bound = _bisect(list_ptr, length, bound, top_k.to(tl.float64), False, TILE)
        mass = _mass(list_ptr, length, bound, TILE)
    if top_p < 1.0:
        bound = _bisect(list_ptr, length, bound, top_p * mass, True, TILE)

    seed = tl.load(fields_ptr + row)
    position = tl.load(lens_ptr + row).to(tl.int64) - tl.load(fields_ptr + num_rows + row)
    most = tl.full([1], float("-inf"), dtype=tl.float32)
    winner = tl.full([1], 0, dtype=tl.int32)
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        magnitude = tl.load(list_ptr + at, mask=at < length, other=0x7FFFFFFF)
        token = tl.load(list_ptr + num_lists.to(tl.int64) * vocab_size + at, mask=at < length, other=0)
        noisy = tl.where(magnitude <= bound, _score(magnitude) + gumbel_noise(seed, position, token), float("-inf"))
        here = tl.max(noisy, axis=0)
        chosen_token = tl.min(tl.where(noisy == here, token, vocab_size), axis=0)
        winner = tl.where(here > most, chosen_token, winner)
        most = tl.maximum(most, here)
    drawn = tl.sum(winner, axis=0)
    tl.store(token_ptr + row, drawn)
    record_token(
        drawn,
        row,
        lens_ptr,
        tokens_ptr,
        slots_ptr,
        batch_counts_ptr,
        count_row_ptr,
        stride_slot,
        max_len,
        vocab_size,
        COUNTED,
    )
