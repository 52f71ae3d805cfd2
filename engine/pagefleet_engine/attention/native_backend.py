"""Paged attention on a CPU by compiled kernels, which read pages where they lie.

Shapes: T tokens of the step, N query heads, K key/value heads, H head size; of latents as `backend` has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.attention import (
    CODES,
    DTYPES,
    MAX_HEAD_DIM,
    MAX_LATENT_DIM,
    AttentionPlan,
    LayerPages,
    PagedStep,
    attend,
    plan_attention,
    write_pages,
)
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.score_rule import ScoreRule
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, LatentMaps, Pages
from pagefleet_engine.attention.support import check_pool
from pagefleet_engine.attention.torch_backend import TorchAttentionStep, TorchBackend
from pagefleet_engine.attention.torch_latents import is_absorbed
from pagefleet_engine.core.kv_groups import KVGroups

_MOST_ABSORBED = 2.0
"""Times the products of keys made by torch; up to so many compiled kernels are done sooner, as they gather nothing."""


def takes_pool(layout: KVLayout, kept: torch.dtype, computed: torch.dtype) -> bool:
    """Whether the kernels read such pages: keys and values, or latents, in e4m3, e5m2 or the type that is computed in,
    float32 or bfloat16."""
    largest = MAX_HEAD_DIM if layout.vectors == 2 else MAX_LATENT_DIM
    return computed in DTYPES and (kept == computed or kept in CODES) and layout.head_dim <= largest


class NativeBackend:
    """Attention over a pool of `layout.shape` in host memory, of a kind that `takes_pool` says."""

    def __init__(self, pool: Tensor, layout: KVLayout, groups: KVGroups, library: Library) -> None:
        """`groups` place each layer of the model in a block of the pool. Raises ConfigError for an unsupported pool."""
        check_pool(pool, layout)
        self.library = library
        self.layers = [layout.layer_view(pool, layer) for layer in range(layout.num_layers)]
        self.places = [groups.place(layer) for layer in range(sum(len(group.layers) for group in groups.groups))]
        self._num_kv_heads = layout.num_kv_heads
        self.by_torch = TorchBackend(pool, layout, groups) if layout.vectors == 1 else None
        """For long prompts over latents."""
        self._pages: dict[tuple[int, int | None], tuple[AttentionSpec, LayerPages]] = {}

    def begin(self, batch: BatchGeometry) -> NativeAttentionStep:
        """Nothing yet; how the work is shared out is planned on first use."""
        return NativeAttentionStep(self, batch)

    def pages_of(self, spec: AttentionSpec, dtype: torch.dtype, num_heads: int | None = None) -> LayerPages:
        """The layer as what attends, with queries of `dtype` and so many heads, is told; None: what writes keys and
        values of `dtype`. Worked out once."""
        key = (spec.layer, num_heads)
        known = self._pages.get(key)
        if known is None or known[0] is not spec:
            writes = ScoreRule(scale=1.0, k_scale=spec.k_scale, v_scale=spec.v_scale)
            rule, heads = (writes, self._num_kv_heads) if num_heads is None else (spec.rule, num_heads)
            _, index = self.places[spec.layer]
            known = self._pages[key] = (spec, LayerPages(self.layers[index], heads, rule, dtype))
        return known[1]


class NativeAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    __slots__ = ("_backend", "_batch", "_by_torch", "_num_threads", "_plans", "_runs", "_steps")

    def __init__(self, backend: NativeBackend, batch: BatchGeometry) -> None:
        self._backend, self._batch = backend, batch
        self._num_threads = torch.get_num_threads()
        self._steps: dict[int, PagedStep] = {}
        self._plans: dict[tuple[int | None, int | None, int], AttentionPlan] = {}
        self._by_torch: TorchAttentionStep | None = None
        self._runs: list[_Run] | None = None

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        group, _ = self._backend.places[spec.layer]
        pages, slots_T = self._backend.pages_of(spec, k_TKH.dtype), self._batch.slot_mappings[group]
        v_TKH = k_TKH if v_TKH is None else v_TKH  # latents are both, and written once
        write_pages(self._backend.library, pages, k_TKH, v_TKH, slots_T, self._num_threads)

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        group, index = self._backend.places[spec.layer]
        return Pages(self._backend.layers[index], self._batch.slot_mappings[group])

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        return self._walk(spec, q_TNH) if spec.latent is None else self._attend_latents(spec, spec.latent, q_TNH)

    def _attend_latents(self, spec: AttentionSpec, maps: LatentMaps, q_TNH: Tensor) -> Tensor:
        """Compared with latents as they lie; or, of long prompts, with keys that torch makes of them."""
        if self._runs is None:
            self._runs = self._rows_alike(q_TNH.shape[2], maps)
        outs = []
        for run in self._runs:
            outs.append((run.step or self)._attend_alike(spec, maps, q_TNH[run.tokens], run.absorbed))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _rows_alike(self, head_dim: int, maps: LatentMaps) -> list[_Run]:
        batch = self._batch
        if batch.query_lens is None or batch.seq_lens is None:
            return [_Run(None, slice(None), absorbed=True)]
        choices = [
            queries == 1 or is_absorbed(queries, context, head_dim, maps, _MOST_ABSORBED)
            for queries, context in zip(batch.query_lens, batch.seq_lens, strict=True)
        ]
        if len(set(choices)) == 1:
            return [_Run(None, slice(None), choices[0])]
        runs, starts = list[_Run](), [0, *accumulate(batch.query_lens)]
        for choice, group in groupby(range(len(choices)), choices.__getitem__):
            rows = list(group)
            tokens = range(starts[rows[0]], starts[rows[-1] + 1])
            part = batch.part(range(rows[0], rows[-1] + 1), tokens)
            runs.append(_Run(NativeAttentionStep(self._backend, part), slice(tokens.start, tokens.stop), choice))
        return runs

    def _attend_alike(self, spec: AttentionSpec, maps: LatentMaps, q_TNH: Tensor, absorbed: bool) -> Tensor:
        if not absorbed:
            return self._make_keys(spec, maps, q_TNH)
        sums_TNW = self._walk(spec, maps.absorb(q_TNH).transpose(0, 1))
        return maps.values(sums_TNW[..., : maps.rank].transpose(0, 1))

    def _make_keys(self, spec: AttentionSpec, maps: LatentMaps, q_TNH: Tensor) -> Tensor:
        """In float32 where the processor does not multiply bfloat16, as torch takes many times as long then."""
        backend = self._backend
        assert backend.by_torch is not None, "pages hold latents"
        if self._by_torch is None:
            self._by_torch = backend.by_torch.begin(self._batch)
        dtype = q_TNH.dtype if backend.library.multiplies_bf16 else torch.float32
        as_made = LatentMaps(maps.made_NXR.to(dtype), maps.nope_dim)
        return self._by_torch.attend(replace(spec, latent=as_made), q_TNH.to(dtype)).to(q_TNH.dtype)

    def _walk(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        backend = self._backend
        pages = backend.pages_of(spec, q_TNH.dtype, q_TNH.shape[1])
        group, _ = backend.places[spec.layer]
        step = self._steps.get(group)
        if step is None:
            batch = self._batch
            step = self._steps[group] = PagedStep(batch.block_tables[group], batch.query_start_loc_S1, batch.seq_lens_S)
        sight = (spec.window, spec.chunk, q_TNH.shape[1])
        plan = self._plans.get(sight)
        if plan is None:
            decodes = self._batch.query_lens is None and self._batch.max_query_len == 1
            plan = plan_attention(backend.library, pages, step, self._num_threads, any_lengths=decodes)
            self._plans[sight] = plan
        return attend(backend.library, pages, step, plan, q_TNH)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows beside each other that attend over latents in the same way."""

    step: NativeAttentionStep | None
    """None: they are all of the step's."""
    tokens: slice
    absorbed: bool
