"""Each backend against attention computed row by row from a dense copy of the context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.attention.backend import AttentionBackend, AttentionSpec, AttentionStep, BatchGeometry
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_kernels.layout import KVLayout

from tests.example_counts import examples
from tests.fakes.native_kernels import native_backend

LAYOUT = KVLayout(num_blocks=96, num_layers=3, num_kv_heads=2, block_size=8, head_dim=16)
GROUPS = group_layers([None] * LAYOUT.num_layers)
NUM_HEADS = 6
SCALE = 0.3


@dataclass(frozen=True)
class Row:
    computed: int
    new: int


@dataclass(frozen=True)
class Case:
    """A pool with each row's context already in its pages, and the step's new tokens."""

    pool: torch.Tensor
    batch: BatchGeometry
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]


def make_case(rows: list[Row], layer: int, seed: int) -> Case:
    torch.manual_seed(seed)
    size, heads, width = LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim
    pool = torch.randn(LAYOUT.shape)
    free = torch.randperm(LAYOUT.num_blocks).tolist()
    seq_lens = [row.computed + row.new for row in rows]
    tables = torch.zeros(len(rows), max(-(-n // size) for n in seq_lens), dtype=torch.int32)
    total = sum(row.new for row in rows)
    q = torch.randn(total, NUM_HEADS, width)
    k, v = torch.randn(total, heads, width), torch.randn(total, heads, width)
    slots, dense, start = [], [], 0
    for index, row in enumerate(rows):
        blocks = [free.pop() for _ in range(-(-seq_lens[index] // size))]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        context_k, context_v = torch.randn(row.computed, heads, width), torch.randn(row.computed, heads, width)
        for position in range(row.computed):
            pool[blocks[position // size], layer, 0, :, position % size] = context_k[position]
            pool[blocks[position // size], layer, 1, :, position % size] = context_v[position]
        slots += [blocks[p // size] * size + p % size for p in range(row.computed, seq_lens[index])]
        own = slice(start, start + row.new)
        dense.append((torch.cat([context_k, k[own]]), torch.cat([context_v, v[own]])))
        start += row.new
    query_lens = [row.new for row in rows]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = BatchGeometry(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        (tables,),
        (torch.tensor(slots),),
        max(query_lens),
        query_lens,
        seq_lens,
    )
    return Case(pool, batch, q, k, v, dense)


def expected(case: Case, window: int | None) -> torch.Tensor:
    outputs, start = [], 0
    assert case.batch.query_lens is not None
    for (k, v), new in zip(case.dense, case.batch.query_lens, strict=True):
        q = case.q[start : start + new]
        start += new
        repeat = NUM_HEADS // LAYOUT.num_kv_heads
        scores = torch.einsum("qnh,cnh->nqc", q, k.repeat_interleave(repeat, 1)) * SCALE
        at = torch.arange(k.shape[0] - new, k.shape[0])[:, None]
        seen = torch.arange(k.shape[0])[None] <= at
        if window is not None:
            seen &= torch.arange(k.shape[0])[None] > at - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("nqc,cnh->qnh", weights, v.repeat_interleave(repeat, 1)))
    return torch.cat(outputs)


def attend(step: AttentionStep, layer: int, case: Case, window: int | None) -> torch.Tensor:
    spec = AttentionSpec(layer=layer, scale=SCALE, window=window)
    step.write(spec, case.k, case.v)
    return step.attend(spec, case.q)


def make_backend(name: str, pool: torch.Tensor) -> AttentionBackend:
    if name == "native":
        return native_backend(pool, LAYOUT, GROUPS)
    return (
        TorchBackend(pool, LAYOUT, GROUPS) if name == "torch" else TritonBackend(pool, LAYOUT, GROUPS, kernels="torch")
    )


MIXES = [
    [Row(0, 1)],
    [Row(37, 1)],
    [Row(0, 5)],
    [Row(9, 1), Row(3, 1), Row(30, 1)],
    [Row(0, 150)],
    [Row(13, 140), Row(20, 1), Row(0, 7)],
    [Row(5, 9), Row(60, 1), Row(0, 33), Row(1, 1), Row(16, 8)],
]


@pytest.mark.parametrize("name", ["torch", "kernels", "native"])
@pytest.mark.parametrize("window", [None, 4, 20])
@pytest.mark.parametrize("rows", MIXES, ids=lambda rows: "+".join(f"{row.computed}.{row.new}" for row in rows))
def test_matches_dense_attention(name: str, window: int | None, rows: list[Row]) -> None:
    case = make_case(rows, layer=1, seed=len(rows))
    step = make_backend(name, case.pool).begin(case.batch)
    out = attend(step, 1, case, window)
    torch.testing.assert_close(out, expected(case, window), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("rows", [*MIXES, [Row(150, 3), Row(131, 140), Row(170, 1)]], ids=str)
def test_rounded_contexts_of_16_bits_match_dense_attention(window: int | None, rows: list[Row]) -> None:
    case = make_case(rows, layer=1, seed=len(rows))
    exact = expected(case, window)
    small = replace(case, pool=case.pool.bfloat16(), q=case.q.bfloat16(), k=case.k.bfloat16(), v=case.v.bfloat16())
    out = attend(TorchBackend(small.pool, LAYOUT, GROUPS).begin(small.batch), 1, small, window)
    torch.testing.assert_close(out.float(), exact, atol=4e-2, rtol=4e-2)


def test_writes_only_its_own_layer_and_slots() -> None:
    case = make_case([Row(3, 4), Row(0, 2)], layer=2, seed=0)
    before = case.pool.clone()
    TorchBackend(case.pool, LAYOUT, GROUPS).begin(case.batch).write(AttentionSpec(layer=2, scale=SCALE), case.k, case.v)
    changed = (case.pool != before).any(-1).nonzero()
    assert set(changed[:, 1].tolist()) == {2}
    slots = set((changed[:, 0] * LAYOUT.block_size + changed[:, 4]).tolist())
    assert slots == set(case.batch.slot_mappings[0].tolist())


def test_one_step_serves_layers_with_different_windows() -> None:
    case = make_case([Row(20, 3), Row(11, 1)], layer=0, seed=3)
    step = TorchBackend(case.pool, LAYOUT, GROUPS).begin(case.batch)
    for window in (None, 6, None):
        out = attend(step, 0, case, window)
        torch.testing.assert_close(out, expected(case, window), atol=2e-5, rtol=2e-5)


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.lists(st.builds(Row, st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 100),
)
def test_any_mix_matches_dense_attention(rows: list[Row], window: int | None, seed: int) -> None:
    case = make_case(rows, layer=0, seed=seed)
    out = attend(TorchBackend(case.pool, LAYOUT, GROUPS).begin(case.batch), 0, case, window)
    torch.testing.assert_close(out, expected(case, window), atol=2e-5, rtol=2e-5)
