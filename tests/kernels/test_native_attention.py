"""The compiled kernels of the CPU against the torch twins, for every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_engine.worker.native import native_library
from pagefleet_kernels.errors import BackendUnavailableError, UnsupportedShapeError
from pagefleet_kernels.fp8 import E5M2, FP8
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.attention import LayerPages, PagedStep, attend, plan_attention, write_pages
from pagefleet_kernels.native.library import Library, load_library
from pagefleet_kernels.reference_attention import varlen_attention
from pagefleet_kernels.score_rule import ScoreRule

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

SETS = {library.instruction_set: library for library in native_libraries()}

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


def run(
    library: Library, batch: Any, rule: ScoreRule, num_threads: int = 2, *, is_latent: bool = False
) -> torch.Tensor:
    kept = batch.kv_cache[:, :1] if is_latent else batch.kv_cache
    pages = LayerPages(kept, batch.q_TNH.shape[1], rule, batch.q_TNH.dtype)
    step = PagedStep(batch.block_tables_SB, batch.query_start_loc_S1, batch.seq_lens_S)
    plan = plan_attention(library, pages, step, num_threads)
    out = attend(library, pages, step, plan, batch.q_TNH)
    again = attend(library, pages, step, plan, batch.q_TNH)
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)  # whichever thread did what
    return out


def check(library: Library, batch: Any, rule: ScoreRule, num_threads: int = 2, *, is_latent: bool = False) -> None:
    out = run(library, batch, rule, num_threads, is_latent=is_latent)
    tables = batch.block_tables_SB, batch.query_start_loc_S1, batch.seq_lens_S
    pages = batch.kv_cache.float() * torch.tensor([rule.k_scale, rule.v_scale]).view(2, 1, 1, 1)
    unscaled = replace(rule, k_scale=1.0, v_scale=1.0)
    expected = varlen_attention(batch.q_TNH.float(), pages, *tables, unscaled, batch.max_query_len)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[out.dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


MIXES = [
    [(1, 1)],
    [(1, 700)],
    [(5, 5)],
    [(70, 70)],
    [(1, 40), (1, 3), (1, 129)],
    [(33, 150), (1, 65), (9, 9), (130, 131)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lens", MIXES, ids=str)
def test_plain(library: Library, lens: Any, dtype: torch.dtype, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(lens, dtype=dtype)
    check(library, batch, ScoreRule(scale=batch.scale))


@pytest.mark.parametrize("fp8", [FP8, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lens", MIXES, ids=str)
def test_pages_of_codes(
    library: Library, lens: Any, dtype: torch.dtype, fp8: torch.dtype, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(lens, dtype=dtype, fp8_scales=(0.5, 2.0), fp8=fp8)
    check(library, batch, ScoreRule(scale=batch.scale, softcap=1.5, k_scale=0.5, v_scale=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [FP8, E5M2], ids=str)
@pytest.mark.parametrize("num_queries", [1, 40])
def test_every_code_is_read_as_torch_does(
    library: Library, num_queries: int, fp8: torch.dtype, dtype: torch.dtype
) -> None:
    """All queries see one token, so that they get its values; nothing writes infinity, which e5m2 has."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    codes.view(torch.uint8)[codes.float().isinf()] = 0
    pages = torch.zeros(1, 2, 1, 64, 256).to(fp8)
    pages[0, 1, 0] = codes
    layer = LayerPages(pages, 1, ScoreRule(scale=1.0, v_scale=0.25, chunk=1), dtype)
    lens = torch.tensor([num_queries], dtype=torch.int32)
    step = PagedStep(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, num_queries], dtype=torch.int32), lens)
    q = torch.zeros(num_queries, 1, 256, dtype=dtype)
    out = attend(library, layer, step, plan_attention(library, layer, step, 1), q)
    expected = (codes.float() * 0.25).to(dtype).expand(num_queries, 1, 256)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_few_long_rows_are_shared_out(library: Library, make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 3000), (2, 1500)], heads=(3, 1))
    rule = ScoreRule(scale=batch.scale, sinks_N=torch.tensor([0.3, -1.0, 2.0]))
    pages = LayerPages(batch.kv_cache, 3, rule)
    step = PagedStep(batch.block_tables_SB, batch.query_start_loc_S1, batch.seq_lens_S)
    plan = plan_attention(library, pages, step, 4)
    assert plan.plan.threads == 4
    assert plan.plan.num_tasks > 8
    for threads in (1, 2, 4):
        check(library, batch, rule, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_latents_are_keys_and_values(
    library: Library, num_heads: int, dtype: torch.dtype, make_batch: Callable[..., Any]
) -> None:
    """Of the width of DeepSeek-V3's."""
    batch = make_batch([(1, 700), (1, 40), (3, 50), (20, 90)], heads=(num_heads, 1), head_dim=576, dtype=dtype)
    batch.kv_cache[:, 1] = batch.kv_cache[:, 0]
    check(library, batch, ScoreRule(scale=batch.scale), is_latent=True)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.integers(1, 40_000) | st.integers(1, 300), min_size=1, max_size=20),
    heads=st.sampled_from([(4, 4), (8, 1), (12, 4), (32, 8), (128, 2)]),
    window=st.none() | st.integers(1, 5000),
    threads=st.integers(1, 256),
)
def test_a_plan_for_any_lengths_has_room(
    library: Library, lens: list[int], heads: tuple[int, int], window: int | None, threads: int
) -> None:
    pages = LayerPages(torch.zeros(1, 2, heads[1], 16, 8), heads[0], ScoreRule(scale=1.0, window=window))
    starts, seq_lens = torch.arange(len(lens) + 1, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    step = PagedStep(torch.zeros(len(lens), 2500, dtype=torch.int32), starts, seq_lens)
    exact, roomy = (plan_attention(library, pages, step, threads, any_lengths=any_) for any_ in (False, True))
    assert roomy.plan.num_tasks == exact.plan.num_tasks
    assert roomy.plan.threads == exact.plan.threads
    for found, room in zip(exact.kept, roomy.kept, strict=True):
        assert found.numel() <= room.numel()
    assert torch.equal(roomy.kept[0][: exact.plan.num_tasks], exact.kept[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (12, 4), (16, 2), (32, 2), (34, 2)], ids=str)
def test_rows_enough_for_heads_together(
    library: Library, heads: tuple[int, int], dtype: torch.dtype, make_batch: Callable[..., Any]
) -> None:
    """A thread takes several heads of a task; one context is cut, and one has too many queries for that."""
    batch = make_batch([(1, 3000), *((1 + i % 2, 50 + 9 * i) for i in range(12)), (40, 90)], heads=heads, dtype=dtype)
    rule = ScoreRule(scale=batch.scale, sinks_N=torch.linspace(-1.0, 2.0, heads[0]))
    check(library, batch, rule)
    clean = run(library, batch, rule)
    batch.q_TNH[3, 1] = float("nan")
    out = run(library, batch, rule)
    assert out[3, 1].isnan().all()
    out[3, 1] = clean[3, 1]
    assert torch.equal(out, clean)


def draw_batch(draw: Callable[..., Any], make_batch: Callable[..., Any], dtype: torch.dtype) -> tuple[Any, ScoreRule]:
    """Of any shape, and any rule."""
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 7, 12, 20])), draw(st.integers(1, 4))
    lens = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=4))
    scales = draw(st.none() | st.just((0.5, 2.0)))
    batch = make_batch(
        [(new, new + computed) for new, computed in lens],
        heads=(group * kv_heads, kv_heads),
        head_dim=draw(st.sampled_from([8, 16, 20, 64, 80, 96, 128])),
        block_size=draw(st.sampled_from([1, 8, 16, 24, 64])),
        dtype=dtype,
        seed=draw(st.integers(0, 100)),
        fp8_scales=scales,
        fp8=draw(st.sampled_from([FP8, E5M2])),
    )
    k_scale, v_scale = scales or (1.0, 1.0)
    per_head = torch.linspace(-1.0, 2.0, group * kv_heads)
    return batch, ScoreRule(
        scale=batch.scale,
        window=draw(st.none() | st.integers(1, 90)),
        chunk=draw(st.none() | st.integers(1, 90)),
        softcap=draw(st.none() | st.just(1.5)),
        sinks_N=per_head if draw(st.booleans()) else None,
        alibi_slopes_N=per_head.abs() if draw(st.booleans()) else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rule_and_shape(library: Library, make_batch: Callable[..., Any], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    batch, rule = draw_batch(data.draw, make_batch, dtype)
    check(library, batch, rule, data.draw(st.integers(1, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_with_its_own_row(
    library: Library, dtype: torch.dtype, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch([(1, 600), (3, 90), (1, 700)], dtype=dtype)
    clean = run(library, batch, ScoreRule(scale=batch.scale))
    batch.q_TNH[0] = float("nan")
    batch.q_TNH[2, 1, 3] = float("inf")
    out = run(library, batch, ScoreRule(scale=batch.scale))
    assert out[0].isnan().all()
    assert out[2, 1].isnan().all()
    assert torch.equal(out[3:], clean[3:])
    assert torch.equal(out[1], clean[1])


def test_a_row_without_context_gives_zeros(library: Library, make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 5), (1, 8)])
    batch.seq_lens_S[1] = 0
    out = run(library, batch, ScoreRule(scale=batch.scale))
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 700])
def test_writes_as_the_twin(library: Library, num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = KVLayout(50, 2, 3, 16, 40)
    pools = torch.zeros(layout.shape, dtype=dtype), torch.zeros(layout.shape, dtype=dtype)
    of_layer, expected = (layout.layer_view(pool, 1) for pool in pools)
    projected = torch.randn(num_tokens, 8, 40).to(dtype)
    k, v = projected[:, 2:5], projected[:, 5:]
    slots = torch.randperm(800)[:num_tokens]
    slots[::5] = -1
    write_pages(library, LayerPages(of_layer, 3, ScoreRule(scale=1.0)), k, v, slots, 2)
    write_kv(k, v, expected, slots, backend="torch")
    assert torch.equal(*pools)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [FP8, E5M2], ids=str)
def test_codes_are_written_as_the_twin_does(library: Library, fp8: torch.dtype, dtype: torch.dtype) -> None:
    """Of all sizes down to below the least code, halfway between two, too large, and no number."""
    torch.manual_seed(0)
    sizes = torch.linspace(-20, 18, 40 * 3 * 64).exp2() * torch.randn(40 * 3 * 64).sign()
    halfway = torch.arange(128, dtype=torch.uint8).view(fp8).float().unfold(0, 2, 1).mean(-1)
    k = torch.cat([sizes, halfway, torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])])[-40 * 3 * 64 :]
    k = k.view(40, 3, 64).to(dtype)
    v = k.flip(0) * 3
    layout, slots = KVLayout(4, 1, 3, 16, 64), torch.randperm(64)[:40]
    pools = torch.zeros(layout.shape).to(fp8), torch.zeros(layout.shape).to(fp8)
    of_layer, expected = (layout.layer_view(pool, 0) for pool in pools)
    rule = ScoreRule(scale=1.0, k_scale=0.75, v_scale=3.0)
    write_pages(library, LayerPages(of_layer, 3, rule, dtype), k, v, slots, 2)
    write_kv(k, v, expected, slots, k_scale=0.75, v_scale=3.0, backend="torch")
    found, wanted = (pool.view(torch.uint8) for pool in pools)
    assert torch.equal(found & 0x7F, wanted & 0x7F)  # what is no number has whatever sign
    numbers = ~pools[1].float().isnan()
    assert torch.equal(found[numbers], wanted[numbers])


def test_pages_that_they_do_not_read_are_refused() -> None:
    for dtype, heads in ((torch.float16, 4), (torch.float32, 3), (torch.int8, 4)):
        with pytest.raises(UnsupportedShapeError):
            LayerPages(torch.zeros(4, 2, 2, 8, 16, dtype=dtype), heads, ScoreRule(scale=1.0))
    for pages, queries in ((torch.float32, torch.bfloat16), (FP8, torch.float16)):
        with pytest.raises(UnsupportedShapeError):
            LayerPages(torch.zeros(4, 2, 2, 8, 16).to(pages), 4, ScoreRule(scale=1.0), queries)


def test_a_library_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"not compiled.* for want of a C"):
        load_library(tmp_path / "none.so")
    (broken := tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match=r"broken\.so cannot be loaded"):
        load_library(broken)


def test_a_worker_says_what_it_computes_with(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert native_library(torch.device("cpu"), enabled=False) is None
        assert native_library(torch.device("cuda"), enabled=True) is None
        best = native_library(torch.device("cpu"), enabled=True)
    assert best is not None
    assert [record.message for record in caplog.records] == [
        "torch computes in the place of compiled kernels: --no-native-kernels",
        f"compiled kernels: {best.instruction_set}",
    ]
