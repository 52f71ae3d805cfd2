"""One token per row of logits on a CPU: one pass over the vocabulary for the largest logits of its blocks, and then
only what may win is looked at.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.library import Library, Sampling
from pagefleet_kernels.reference_sampling import record_tokens
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import SamplingRows

_LOGITS_PER_THREAD = 1 << 15
"""That one thread goes through sooner than another wakes."""


def sample_natively(
    library: Library, logits_RV: Tensor, rows: SamplingRows, lens_R: Tensor, record: TokenRecord
) -> Tensor:
    """As `sampling.sample_tokens`, whose twin draws the same tokens; int32 [R]. Leaves the logits as they are."""
    if logits_RV.dtype not in DTYPES:
        logits_RV = logits_RV.float()
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.stride(1) != 1 or not num_rows == len(rows) == len(lens_R) == len(record.slots_R):
        raise UnsupportedShapeError(
            f"logits {list(logits_RV.shape)} need contiguous rows, and as many parameters and lengths"
        )
    token_R = torch.empty(num_rows, dtype=torch.int32)
    if not num_rows:
        return token_R
    threads = min(torch.get_num_threads(), num_rows, 1 + logits_RV.numel() // _LOGITS_PER_THREAD)
    wanted = Sampling(
        logits=logits_RV.data_ptr(),
        stride=logits_RV.stride(0),
        fields=rows.fields.data_ptr(),
        lens=lens_R.data_ptr(),
        rows=num_rows,
        vocab=vocab_size,
        is_bf16=logits_RV.dtype == torch.bfloat16,
        threads=threads,
    )
    memory = torch.empty(library.sampling_room(vocab_size, threads), dtype=torch.uint8)
    library.sample(wanted, token_R.data_ptr(), memory.data_ptr())
    record_tokens(token_R, lens_R, record)
    return token_R
