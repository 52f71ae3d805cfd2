"""Attention over latents in pages against keys and values made for the whole context at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pagefleet_engine.attention import native_backend, torch_latents
from pagefleet_engine.attention.backend import AttentionBackend, AttentionSpec, BatchGeometry, LatentMaps
from pagefleet_engine.attention.native_backend import NativeBackend
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.attention.torch_latents import is_absorbed
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.models.latent_attention import latent_maps
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.library import Library

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.native_kernels import native_libraries

LIBRARIES = native_libraries()
compiled = pytest.mark.skipif(not LIBRARIES, reason="the kernels of the CPU were not compiled")
RANK, NOPE, ROPE, VALUE, HEADS = 32, 12, 8, 20, 6
LAYOUT = KVLayout(200, 3, 1, 8, RANK + ROPE, vectors=1)
GROUPS = group_layers([None] * 3)
Rows = Sequence[tuple[int, int]]
"""Tokens that were computed before, and new ones."""
MIXES: list[Rows] = [
    [(0, 1)],
    [(37, 1)],
    [(0, 5)],
    [(9, 1), (3, 1), (30, 1)],
    [(0, 300)],
    [(13, 140), (20, 1), (0, 7)],
    [(250, 200), (0, 190)],
    [(5, 9), (60, 1), (0, 33), (1, 1), (16, 8)],
]


def make_spec(
    k_scale: float = 1.0, dtype: torch.dtype = torch.float32, library: Library | None = None
) -> AttentionSpec:
    generator = torch.Generator().manual_seed(5)
    made = (torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator) / RANK**0.5).to(dtype)
    return AttentionSpec(layer=1, scale=0.3, latent=latent_maps(made, NOPE, library), k_scale=k_scale)


def geometry(rows: Rows, computed: bool) -> BatchGeometry:
    """Of what was computed before, or of what is new, in pages of no order."""
    free = torch.randperm(LAYOUT.num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    ends = [before if computed else before + new for before, new in rows]
    lens = [before if computed else new for before, new in rows]
    tables = torch.zeros(len(rows), 80, dtype=torch.int32)
    slots: list[int] = []
    for index, ((before, new), end, length) in enumerate(zip(rows, ends, lens, strict=True)):
        blocks = [free.pop() for _ in range(-(-(before + new) // LAYOUT.block_size))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[at // 8] * 8 + at % 8 for at in range(end - length, end)]
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    tensors = (starts, torch.tensor(ends, dtype=torch.int32), (tables,), (torch.tensor(slots),))
    return BatchGeometry(*tensors, max(lens), lens, ends)


def check(backend: AttentionBackend, rows: Rows, spec: AttentionSpec, tolerance: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    sequences = [DenseSequence() for _ in rows]
    for computed in (True, False):
        batch = geometry(rows, computed)
        assert batch.query_lens is not None
        total = sum(batch.query_lens)
        kept = torch.randn(total, 1, RANK + ROPE, generator=generator).to(dtype)
        q = torch.randn(total, HEADS, NOPE + ROPE, generator=generator).to(dtype)
        if not total:
            continue
        dense = DenseStep(list(zip(sequences, batch.query_lens, strict=True)))
        step = backend.begin(batch)
        dense.write(spec, kept, None)
        if isinstance(backend, TritonBackend):
            pages = step.pages(spec)
            pages.kv_cache[pages.slot_mapping_T // 8, 0, 0, pages.slot_mapping_T % 8] = kept[:, 0]
        else:
            step.write(spec, kept, None)
        if not computed:
            found, expected = step.attend(spec, q), dense.attend(spec, q)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("made_numbers", [2**24, 1], ids=["whole", "parts"])
@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_pages_of_latents_match_dense_attention(rows: Rows, made_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_latents, "MADE_NUMBERS", made_numbers)
    check(TorchBackend(torch.zeros(LAYOUT.shape), LAYOUT, GROUPS), rows, make_spec(), 2e-5, torch.float32)


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_both_forms_serve_every_batch(rows: Rows, is_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_latents, "MADE_NUMBERS", 1)
    monkeypatch.setattr(torch_latents, "is_absorbed", lambda *_: not is_made)
    check(TorchBackend(torch.zeros(LAYOUT.shape), LAYOUT, GROUPS), rows, make_spec(), 2e-5, torch.float32)


@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_kernels_match_dense_attention(rows: Rows) -> None:
    check(TritonBackend(torch.zeros(LAYOUT.shape), LAYOUT, GROUPS), rows, make_spec(), 2e-5, torch.float32)


@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_rounded_latents_match_roughly(rows: Rows) -> None:
    pool = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
    check(TorchBackend(pool, LAYOUT, GROUPS), rows, make_spec(dtype=torch.bfloat16), 5e-2, torch.bfloat16)


@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_latents_in_8_bits_match_roughly(rows: Rows) -> None:
    """With a scale that is undone where they are read."""
    pool = torch.zeros(LAYOUT.shape, dtype=torch.float8_e4m3fn)
    check(TorchBackend(pool, LAYOUT, GROUPS), rows, make_spec(k_scale=0.05), 2e-1, torch.float32)


@compiled
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("is_made", [None, True, False], ids=["either", "made", "absorbed"])
@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_compiled_kernels_match_dense_attention(
    rows: Rows, is_made: bool | None, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_made is not None:
        monkeypatch.setattr(native_backend, "is_absorbed", lambda *_: not is_made)
    for library in LIBRARIES:
        backend = NativeBackend(torch.zeros(LAYOUT.shape, dtype=dtype), LAYOUT, GROUPS, library)
        check(backend, rows, make_spec(dtype=dtype, library=library), tolerance, dtype)


@compiled
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rows", MIXES, ids=str)
def test_compiled_kernels_read_latents_in_8_bits(rows: Rows, stored: torch.dtype) -> None:
    backend = NativeBackend(torch.zeros(LAYOUT.shape, dtype=stored), LAYOUT, GROUPS, LIBRARIES[0])
    check(backend, rows, make_spec(k_scale=0.05, library=LIBRARIES[0]), 4e-1, torch.float32)


def test_long_queries_are_worth_keys_and_values() -> None:
    """At the widths of DeepSeek-V3: a decode never is, and of a prompt only what has a long context before it."""
    maps = LatentMaps(torch.empty(1, 256, 512), 128)
    assert is_absorbed(1, 100_000, 192, maps)
    assert not is_absorbed(2048, 2048, 192, maps)
    assert is_absorbed(100, 100_000, 192, maps)
    assert not is_absorbed(300, 100_000, 192, maps)
