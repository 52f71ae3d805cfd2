"""Bans all tokens but those that a packed mask allows.

Shapes: R rows, V vocabulary, W words of 32 tokens, which cover the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import launch_table

TOKENS_PER_WORD = 32
NEGATIVE_INFINITY = float("-inf")
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""As wide as a float."""
_BANNED = {kind: int(torch.tensor(NEGATIVE_INFINITY, dtype=kind).view(wide)) for kind, wide in _INTEGERS.items()}
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_KEEPS_OF_BYTE = {size: -_BITS_OF_BYTE.astype(f"i{size}") for size in (2, 4, 8)}
"""[256, 8]: all bits of an integer where a byte's token may come, else none."""


def num_words(vocab_size: int) -> int:
    """Words that a mask over so many tokens takes."""
    return -(-vocab_size // TOKENS_PER_WORD)


def mask_tokens_(logits_RV: Tensor, allowed_RW: Tensor, *, backend: Backend | None = None) -> None:
    """Set every logit to -inf whose bit is 0: bit `i % 32` of word `i // 32` is token i's. Never waits for the device.

    Args:
        logits_RV: any float type, rows contiguous.
        allowed_RW: int32, contiguous.
    """
    num_rows, vocab_size = logits_RV.shape
    if allowed_RW.shape != (num_rows, num_words(vocab_size)) or allowed_RW.dtype != torch.int32:
        raise UnsupportedShapeError(
            f"{num_rows} rows of {vocab_size} logits need an int32 mask of {num_words(vocab_size)} words each, not "
            f"{allowed_RW.dtype} {list(allowed_RW.shape)}"
        )
    if logits_RV.stride(1) != 1 or not allowed_RW.is_contiguous():
        raise UnsupportedShapeError("rows of logits, and the mask, must be contiguous")
    if num_rows == 0:
        return
    if choose_backend(logits_RV.device, backend) == "torch":
        _mask_by_torch(logits_RV, allowed_RW.cpu().numpy().view(np.uint8))
        return
    block = launch_table(architecture(logits_RV.device)).tile_elements
    _mask_kernel[(num_rows, -(-vocab_size // block))](
        logits_RV,
        allowed_RW,
        logits_RV.stride(0),
        allowed_RW.stride(0),
        vocab_size,
        BLOCK=block,
        **COMPILE_OPTIONS,
    )


def _mask_by_torch(logits_RV: Tensor, allowed: NDArray[np.uint8]) -> None:
    """On the bits of floats, which takes no branch: with `where` or `masked_fill` it is up to 20 times as long."""
    num_rows, vocab_size = logits_RV.shape
    keep_RV = _KEEPS_OF_BYTE[logits_RV.itemsize].take(allowed, axis=0).reshape(num_rows, -1)[:, :vocab_size]
    banned = _BANNED[logits_RV.dtype]
    host_RV = logits_RV.view(_INTEGERS[logits_RV.dtype]).cpu()
    bits_RV = host_RV.numpy()  # of the logits themselves where they are on the host
    bits_RV -= banned
    bits_RV &= keep_RV
    bits_RV += banned
    if logits_RV.device.type != "cpu":
        logits_RV.copy_(host_RV.view(logits_RV.dtype))


@jit()
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, allowed_ptr, stride_row, num_words, vocab_size, BLOCK: tl.constexpr
):
    """One row and block of tokens; what is allowed is neither read nor written."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(allowed_ptr + row * num_words + token // 32, mask=inside, other=0)
    banned = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_ptr + row * stride_row + token, float("-inf"), mask=banned)
