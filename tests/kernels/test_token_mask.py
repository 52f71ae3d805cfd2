"""Packed masks by kernel and by twin, against bits read one by one."""

from __future__ import annotations

import math

import pytest
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.token_mask import mask_tokens_, num_words

BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 320, 5003])
def test_only_what_has_its_bit_is_left(
    backend: Backend, dtype: torch.dtype, vocab_size: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide_RV = torch.randn(4, vocab_size + 16, generator=generator).to(dtype).to(device)
    logits_RV = wide_RV[:, 8:-8]
    plain_RV, around = logits_RV.clone(), (wide_RV[:, :8].clone(), wide_RV[:, -8:].clone())
    words = torch.randint(-(2**31), 2**31, (4, num_words(vocab_size)), generator=generator).to(torch.int32)
    words[0], words[1] = 0, -1
    mask_tokens_(logits_RV, words.to(device), backend=backend)
    for row in range(4):
        for token in range(vocab_size):
            is_allowed = (int(words[row, token // 32]) >> (token % 32)) & 1
            assert logits_RV[row, token] == (plain_RV[row, token] if is_allowed else -math.inf)
    assert torch.equal(wide_RV[:, :8], around[0])
    assert torch.equal(wide_RV[:, -8:], around[1])


@BACKENDS
def test_what_is_no_number_is_banned_or_left(backend: Backend, device: torch.device) -> None:
    logits_RV = torch.tensor([[math.nan, math.inf, -math.inf, 1.0] * 2], device=device)
    mask_tokens_(logits_RV, torch.tensor([[0b1111]], dtype=torch.int32, device=device), backend=backend)
    assert logits_RV[0, 0].isnan()
    assert logits_RV[0, 1:].tolist() == [math.inf, -math.inf, 1.0, *[-math.inf] * 4]


@BACKENDS
def test_no_row_is_no_work(backend: Backend, device: torch.device) -> None:
    empty_RV = torch.empty(0, 40, device=device)
    mask_tokens_(empty_RV, torch.empty(0, 2, dtype=torch.int32, device=device), backend=backend)


@BACKENDS
def test_a_mask_of_another_size_is_refused(backend: Backend, device: torch.device) -> None:
    with pytest.raises(UnsupportedShapeError, match="need an int32 mask of 2 words each"):
        mask_tokens_(
            torch.zeros(1, 33, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device), backend=backend
        )
