"""Paged attention on a CPU by compiled kernels, which read pages where they lie.

Shapes: T tokens of the step, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import torch
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.attention import (
    CODES,
    DTYPES,
    MAX_HEAD_DIM,
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

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, Pages
from pagefleet_engine.attention.support import check_pool
from pagefleet_engine.core.kv_groups import KVGroups


def takes_pool(layout: KVLayout, dtype: torch.dtype) -> bool:
    """Whether the kernels read such pages: keys and values (no latents), in float32, bfloat16, e4m3 or e5m2."""
    return layout.vectors == 2 and (dtype in DTYPES or dtype in CODES) and layout.head_dim <= MAX_HEAD_DIM


class NativeBackend:
    """Attention over a pool of `layout.shape` in host memory, of a kind that `takes_pool` says."""

    def __init__(self, pool: Tensor, layout: KVLayout, groups: KVGroups, library: Library) -> None:
        """`groups` place each layer of the model in a block of the pool. Raises ConfigError for an unsupported pool."""
        check_pool(pool, layout)
        self.library = library
        self.layers = [layout.layer_view(pool, layer) for layer in range(layout.num_layers)]
        self.places = [groups.place(layer) for layer in range(sum(len(group.layers) for group in groups.groups))]
        self._num_kv_heads = layout.num_kv_heads
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

    __slots__ = ("_backend", "_batch", "_num_threads", "_plans", "_steps")

    def __init__(self, backend: NativeBackend, batch: BatchGeometry) -> None:
        self._backend, self._batch = backend, batch
        self._num_threads = torch.get_num_threads()
        self._steps: dict[int, PagedStep] = {}
        self._plans: dict[tuple[int | None, int | None, int], AttentionPlan] = {}

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        assert v_TKH is not None, "latents are not for these kernels"
        group, _ = self._backend.places[spec.layer]
        pages, slots_T = self._backend.pages_of(spec, k_TKH.dtype), self._batch.slot_mappings[group]
        write_pages(self._backend.library, pages, k_TKH, v_TKH, slots_T, self._num_threads)

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        group, index = self._backend.places[spec.layer]
        return Pages(self._backend.layers[index], self._batch.slot_mappings[group])

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
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
