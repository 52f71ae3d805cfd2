"""The Triton kernels over latents against their twins: shapes, types, ragged batches, parts and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import E5M2, FP8, LARGEST_FP8
from pagefleet_kernels.latent_attention import latent_attention
from pagefleet_kernels.latents import prepare_latents

Close = Callable[[torch.Tensor, torch.Tensor], None]
Lens = Sequence[tuple[int, int]]
"""New tokens and all tokens of each sequence."""
MIXED: Lens = [(1, 133), (5, 18), (29, 63), (1, 7)]
DECODE: Lens = [(1, 133), (1, 1), (1, 63)]
STORED_SCALE = 0.05


@dataclass(frozen=True, eq=False)
class Batch:
    """Queries over latents in pages of no order."""

    q_TNW: torch.Tensor
    latents: torch.Tensor
    tables_SB: torch.Tensor
    starts_S1: torch.Tensor
    seq_lens_S: torch.Tensor
    rank: int
    max_query_len: int

    def attend(self, backend: Backend, num_splits: int | None = None) -> torch.Tensor:
        scale = STORED_SCALE if self.latents.dtype in LARGEST_FP8 else 1.0
        return latent_attention(
            self.q_TNW, self.latents, self.tables_SB, self.starts_S1, self.seq_lens_S, self.max_query_len,
            rank=self.rank, scale=0.2, stored_scale=scale, num_splits=num_splits, backend=backend,
        )  # fmt: skip


def make_batch(
    device: torch.device,
    lens: Lens,
    *,
    heads: int = 4,
    rank: int = 32,
    rotated: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    pad: int = 0,
) -> Batch:
    """`pad`: tokens after those of all sequences."""
    generator = torch.Generator().manual_seed(len(lens))
    counts = [-(-length // block_size) for _, length in lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    kept = torch.randn(sum(counts) + 2, block_size, rank + rotated, generator=generator)
    # a view with gaps, as a layer's pages are
    pool = torch.zeros(len(kept), 2, block_size, rank + rotated, dtype=stored or dtype, device=device)
    pool[:, 1] = (kept / STORED_SCALE if stored in LARGEST_FP8 else kept).to(pool.dtype).to(device)
    new = [query_len for query_len, _ in lens]
    q = torch.randn(heads, sum(new) + pad, rank + rotated, generator=generator).to(dtype).to(device)
    return Batch(
        q.transpose(0, 1),
        pool[:, 1],
        tables.to(device),
        torch.tensor([0, *new]).cumsum(0).int().to(device),
        torch.tensor([length for _, length in lens], dtype=torch.int32).to(device),
        rank,
        max(new),
    )


@pytest.mark.parametrize("lens", [MIXED, DECODE, [(70, 70)], [(3, 40)]], ids=str)
@pytest.mark.parametrize(("heads", "rank", "rotated", "block_size"), [(4, 32, 16, 16), (5, 24, 8, 8), (20, 64, 16, 64)])
def test_sums_match_their_twin(
    lens: Lens, heads: int, rank: int, rotated: int, block_size: int, device: torch.device, assert_close: Close
) -> None:
    batch = make_batch(device, lens, heads=heads, rank=rank, rotated=rotated, block_size=block_size)
    assert_close(batch.attend("triton"), batch.attend("torch"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lens", [MIXED, DECODE], ids=["mixed", "decode"])
def test_sums_in_16_bits(lens: Lens, dtype: torch.dtype, device: torch.device, assert_close: Close) -> None:
    batch = make_batch(device, lens, dtype=dtype)
    assert_close(batch.attend("triton"), batch.attend("torch"))


@pytest.mark.parametrize("lens", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("stored", [FP8, E5M2])
def test_latents_in_8_bits(lens: Lens, stored: torch.dtype, device: torch.device, assert_close: Close) -> None:
    batch = make_batch(device, lens, stored=stored)
    assert_close(batch.attend("triton"), batch.attend("torch"))


@pytest.mark.parametrize("lens", [MIXED, DECODE, [(1, 300), (40, 60)]], ids=["mixed", "decode", "long"])
@pytest.mark.parametrize("num_splits", [1, 2, 8, 32])
def test_parts_are_merged(lens: Lens, num_splits: int, device: torch.device, assert_close: Close) -> None:
    batch = make_batch(device, lens)
    assert_close(batch.attend("triton", num_splits), batch.attend("torch"))


@pytest.mark.parametrize("lens", [MIXED, DECODE], ids=["mixed", "decode"])
def test_padding_is_zero(lens: Lens, device: torch.device, assert_close: Close) -> None:
    """Sequences of length 0 and tokens after the last."""
    batch = make_batch(device, lens, pad=3)
    lengths = batch.seq_lens_S.clone()
    lengths[-1] = 0
    batch = replace(batch, seq_lens_S=lengths)
    out = batch.attend("triton")
    assert_close(out, batch.attend("torch"))
    assert not out[int(batch.starts_S1[-2]) :].any()


def test_widths_that_do_not_fit_are_refused(device: torch.device) -> None:
    batch = make_batch(device, DECODE)
    with pytest.raises(UnsupportedShapeError, match="must be as wide as latents"):
        replace(batch, rank=48).attend("torch")
    with pytest.raises(UnsupportedShapeError, match="must be as wide as latents"):
        replace(batch, q_TNW=batch.q_TNW[..., :40]).attend("torch")
    with pytest.raises(UnsupportedShapeError, match="up to 512 are"):
        make_batch(device, DECODE, rank=600).attend("torch")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("stored", [None, FP8])
@pytest.mark.parametrize(("heads", "rank", "rotated", "nope"), [(3, 24, 8, 12), (4, 64, 16, 16), (130, 32, 64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_matches_the_twin(
    dtype: torch.dtype,
    heads: int,
    rank: int,
    rotated: int,
    nope: int,
    stored: torch.dtype | None,
    interleaved: bool,
    device: torch.device,
    assert_close: Close,
) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    q, kept, norm = random(6, heads, nope + rotated), random(6, rank + rotated), random(rank)
    table = torch.randn(40, rotated, generator=generator).to(device)
    positions, slots = torch.tensor([3, 0, 39, 7, 7, 1]).to(device), torch.tensor([5, -1, 17, 0, 8, 22]).to(device)
    found = []
    for backend in ("triton", "torch"):
        pool = torch.zeros(3, 2, 8, rank + rotated, dtype=stored or dtype, device=device)
        out = prepare_latents(
            q.clone(), kept.clone(), norm, table, positions, pool[:, 1], slots,
            eps=1e-6, interleaved=interleaved, scale=0.5 if stored else 1.0, backend=backend,
        )  # fmt: skip
        assert not pool[:, 0].float().any()
        found.append((out, pool[:, 1].to(dtype)))
    assert_close(found[0][0], found[1][0])
    if stored is None:
        assert_close(found[0][1], found[1][1])
    else:  # one step of e4m3, where the last place before it differs
        torch.testing.assert_close(found[0][1], found[1][1], atol=2e-3, rtol=0.13)


def test_neighbours_turn_against_each_other(device: torch.device) -> None:
    """By hand: a quarter turn takes (x, y) to (-y, x); norms of a latent of equal numbers are the weight."""
    table = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).to(device)
    q = torch.tensor([[[9.0, 1.0, 2.0, 3.0, 4.0]]]).to(device)
    kept, norm = torch.tensor([[5.0, 5.0, 1.0, 2.0, 3.0, 4.0]]).to(device), torch.tensor([0.5, 2.0]).to(device)
    pages = torch.zeros(1, 1, 6, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    prepare_latents(q, kept, norm, table, zero, pages, zero, eps=0.0, interleaved=True)
    assert q.flatten().tolist() == [9.0, -2.0, 1.0, -4.0, 3.0]
    assert pages.flatten().tolist() == [0.5, 2.0, -2.0, 1.0, -4.0, 3.0]
