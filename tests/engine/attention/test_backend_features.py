"""Both backends over all that a layer can ask for: the CPU's against the kernels' twins, which have an oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pagefleet_engine.attention.backend import AttentionBackend, AttentionSpec, BatchGeometry
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.core.kv_groups import KVGroup, KVGroups
from pagefleet_engine.errors import ConfigError
from pagefleet_kernels.layout import KVLayout

from tests.fakes.native_kernels import native_backend

LAYOUT = KVLayout(num_blocks=64, num_layers=2, num_kv_heads=2, block_size=8, head_dim=16)
GROUPS = KVGroups((KVGroup((0, 2), None), KVGroup((1, 3), 12)), layers_per_block=2)
NUM_HEADS = 4
PER_HEAD = torch.tensor([0.5, -1.0, 2.0, 0.1])
MIXES = [[(40, 1)], [(0, 30)], [(9, 1), (30, 1), (17, 1)], [(13, 20), (20, 1), (0, 7)]]
FEATURES: list[dict[str, Any]] = [
    {"softcap": 1.5},
    {"sinks_N": PER_HEAD},
    {"alibi_slopes_N": PER_HEAD.abs()},
    {"softcap": 1.5, "sinks_N": PER_HEAD, "alibi_slopes_N": PER_HEAD.abs()},
]


def make_step(rows: list[tuple[int, int]], common: int = 0) -> tuple[BatchGeometry, torch.Tensor, torch.Tensor]:
    """A batch of (computed, new) rows with other blocks in each group, its queries, and its new keys and values."""
    size = LAYOUT.block_size
    free = torch.randperm(LAYOUT.num_blocks).tolist()
    seq_lens = [computed + new for computed, new in rows]
    tables, slots = [], []
    for _ in GROUPS.groups:
        table = torch.zeros(len(rows), max(-(-length // size) for length in seq_lens), dtype=torch.int32)
        shared = [free.pop() for _ in range(common)]
        mapping = []
        for row, (computed, new) in enumerate(rows):
            own = [free.pop() for _ in range(-(-seq_lens[row] // size) - common)]
            table[row, : common + len(own)] = torch.tensor(shared + own)
            mapping += [int(table[row, p // size]) * size + p % size for p in range(computed, computed + new)]
        tables.append(table)
        slots.append(torch.tensor(mapping))
    query_lens = [new for _, new in rows]
    batch = BatchGeometry(
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        tuple(tables),
        tuple(slots),
        max(query_lens),
        query_lens,
        seq_lens,
        num_common_blocks=common,
    )
    total = sum(query_lens)
    return batch, torch.randn(total, NUM_HEADS, 16), torch.randn(2, total, LAYOUT.num_kv_heads, 16)


def run(backend: AttentionBackend, spec: AttentionSpec, step_inputs: tuple[Any, ...]) -> torch.Tensor:
    batch, q, (k, v) = step_inputs
    step = backend.begin(batch)
    step.write(spec, k, v)
    return step.attend(spec, q)


def assert_backends_agree(
    spec: AttentionSpec, step_inputs: tuple[Any, ...], dtype: torch.dtype = torch.float32
) -> None:
    pool = torch.randn(LAYOUT.shape).to(dtype)
    other = pool.clone()
    out = run(TorchBackend(pool, LAYOUT, GROUPS), spec, step_inputs)
    expected = run(TritonBackend(other, LAYOUT, GROUPS, kernels="torch"), spec, step_inputs)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(pool.float(), other.float()), "the backends wrote different things"
    assert out.is_contiguous()


@pytest.mark.parametrize("rows", MIXES, ids=str)
@pytest.mark.parametrize("features", [{}, *FEATURES], ids="+".join)
@pytest.mark.parametrize(
    ("layer", "stored"), [(0, torch.float32), (3, torch.float32), (3, torch.float8_e4m3fn), (0, torch.float8_e5m2)]
)
def test_compiled_kernels_are_as_torch(
    layer: int, stored: torch.dtype, features: dict[str, Any], rows: list[tuple[int, int]]
) -> None:
    torch.manual_seed(len(rows))
    spec = AttentionSpec(
        layer=layer, scale=0.3, window=12 if layer == 3 else None, k_scale=0.25, v_scale=2.0, **features
    )
    inputs, pool = make_step(rows), torch.randn(LAYOUT.shape).to(stored)
    other = pool.clone()
    out, expected = (
        run(native_backend(pool, LAYOUT, GROUPS), spec, inputs),
        run(TorchBackend(other, LAYOUT, GROUPS), spec, inputs),
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(pool.float(), other.float()), "the backends wrote different things"


@pytest.mark.parametrize("rows", MIXES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("layer", [0, 3])
def test_features(layer: int, features: dict[str, Any], rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(len(rows))
    assert_backends_agree(
        AttentionSpec(layer=layer, scale=0.3, window=12 if layer == 3 else None, **features), make_step(rows)
    )


@pytest.mark.parametrize("rows", [*MIXES, [(100, 140)], [(48, 24), (47, 1)]], ids=str)
@pytest.mark.parametrize("chunk", [1, 8, 20, 64])
def test_chunks(chunk: int, rows: list[tuple[int, int]]) -> None:
    """Also those that end within a block, and more queries than one block of them has."""
    torch.manual_seed(len(rows))
    assert_backends_agree(AttentionSpec(layer=3, scale=0.3, chunk=chunk), make_step(rows))


@pytest.mark.parametrize("rows", MIXES, ids=str)
@pytest.mark.parametrize("features", [{}, FEATURES[-1]], ids=["plain", "all"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_pool_in_fp8_with_scales(features: dict[str, Any], rows: list[tuple[int, int]], stored: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(layer=2, scale=0.3, k_scale=0.25, v_scale=2.0, **features)
    assert_backends_agree(spec, make_step(rows), stored)


def test_scales_are_of_no_matter_to_other_pools() -> None:
    torch.manual_seed(0)
    inputs, pool = make_step([(5, 3), (8, 1)]), torch.randn(LAYOUT.shape)
    plain, scaled = AttentionSpec(layer=0, scale=0.3), AttentionSpec(layer=0, scale=0.3, k_scale=9.0, v_scale=9.0)
    backend = TorchBackend(pool, LAYOUT, GROUPS)
    assert torch.equal(run(backend, scaled, inputs), run(backend, plain, inputs))
    assert_backends_agree(scaled, inputs)


@pytest.mark.parametrize("name", ["torch", "kernels", "native"])
def test_layers_of_a_group_lie_beside_each_other_in_its_blocks(name: str) -> None:
    batch, _, (k, v) = make_step([(3, 4), (0, 9)])
    for layer, (group, index) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        pool = torch.zeros(LAYOUT.shape)
        backend: AttentionBackend
        if name == "native":
            backend = native_backend(pool, LAYOUT, GROUPS)
        elif name == "torch":
            backend = TorchBackend(pool, LAYOUT, GROUPS)
        else:
            backend = TritonBackend(pool, LAYOUT, GROUPS, kernels="torch")
        spec = AttentionSpec(layer=layer, scale=1.0)
        step = backend.begin(batch)
        step.write(spec, k, v)
        written = pool.any(-1).any(3).any(2).nonzero()
        assert set(written[:, 1].tolist()) == {index}
        assert set(written[:, 0].tolist()) == {int(slot) // 8 for slot in batch.slot_mappings[group]}
        pages = step.pages(spec)
        assert torch.equal(pages.kv_cache, pool[:, index])
        assert pages.slot_mapping_T is batch.slot_mappings[group]


@pytest.mark.parametrize("rows", [[(17, 1), (30, 1)], [(16, 9), (40, 1)]], ids=["decode", "mixed"])
def test_a_shared_prefix_changes_nothing(rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(1)
    inputs, pool = make_step(rows, common=2), torch.randn(LAYOUT.shape)
    for spec in (
        AttentionSpec(layer=0, scale=0.3, softcap=2.0),
        AttentionSpec(layer=1, scale=0.3, window=12),
        AttentionSpec(layer=1, scale=0.3, chunk=12),
    ):
        expected = run(TorchBackend(pool.clone(), LAYOUT, GROUPS), spec, inputs)
        out = run(TritonBackend(pool, LAYOUT, GROUPS, kernels="triton"), spec, inputs)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_pools_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float64 is not supported: choose bfloat16, .*float8_e4m3fn"):
        TorchBackend(torch.zeros(LAYOUT.shape, dtype=torch.float64), LAYOUT, GROUPS)
    with pytest.raises(ConfigError, match="its layout says"):
        TritonBackend(torch.zeros(LAYOUT.shape)[1:], LAYOUT, GROUPS)
    large = KVLayout(num_blocks=1, num_layers=2, num_kv_heads=1, block_size=8, head_dim=512)
    with pytest.raises(ConfigError, match=r"heads of 512 .* up to 256"):
        TritonBackend(torch.zeros(large.shape), large, GROUPS)
    TorchBackend(torch.zeros(large.shape), large, GROUPS)
