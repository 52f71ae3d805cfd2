"""Attention over pages that stay where they are, on a CPU: block tables are walked, nothing is gathered.

Shapes: T tokens of the step, S sequences, B blocks per table, N query heads, K key heads, H head size.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import E5M2, FP8
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.native.library import TASK_INTS, Layer, Library, Plan, PlanSize, Step
from pagefleet_kernels.score_rule import ScoreRule

DTYPES = (torch.float32, torch.bfloat16)
"""Of queries, and of pages that hold what was computed."""
CODES = {FP8: 1, E5M2: 2}
"""Of pages that hold numbers over a scale, as `PAGES_` of kernels.h."""
MAX_HEAD_DIM = 512
"""Numbers of a key."""
MAX_LATENT_DIM = 1024
"""Of what is kept of a token, where that is key and value in one."""

_WRITES_PER_THREAD = 1 << 15
"""Numbers of keys that one thread writes sooner than another wakes."""


class LayerPages:
    """One layer's pages and how it attends, as the kernels are told; keeps alive what it points to."""

    __slots__ = ("kv_cache", "layer", "rule")

    def __init__(self, kv_cache: Tensor, num_heads: int, rule: ScoreRule, dtype: torch.dtype | None = None) -> None:
        """Raises UnsupportedShapeError.

        Args:
            kv_cache: [num_blocks, 2, K, block_size, H] in a type of DTYPES or CODES; or of latents, which are keys and
                values in one, [num_blocks, 1, 1, block_size, W].
            num_heads: of queries.
            rule: which keys a query sees, how scores are made of products, and what multiplies codes.
            dtype: of queries, of what is written and of results, one of DTYPES; that of pages unless they hold codes.
        """
        is_latent = kv_cache.dim() == 5 and kv_cache.shape[1] == 1
        keys, values = (kv_cache[:, 0], kv_cache[:, 0]) if is_latent else split_kv(kv_cache)
        _, kv_heads, block_size, head_dim = keys.shape
        dtype = dtype or kv_cache.dtype
        fits = kv_cache.dtype in CODES or kv_cache.dtype == dtype
        largest = MAX_LATENT_DIM if is_latent else MAX_HEAD_DIM
        if dtype not in DTYPES or not fits or kv_cache.device.type != "cpu" or head_dim > largest:
            raise UnsupportedShapeError(
                f"pages of {kv_cache.dtype} with heads of {head_dim} on {kv_cache.device} are not for these kernels"
            )
        k_scale, v_scale = (rule.k_scale, rule.v_scale) if kv_cache.dtype in CODES else (1.0, 1.0)
        v_scale = k_scale if is_latent else v_scale
        if keys.stride()[2:] != (head_dim, 1) or num_heads % kv_heads:
            raise UnsupportedShapeError(f"{num_heads} heads do not fit pages with strides {kv_cache.stride()}")
        rule.check_heads(num_heads, kv_cache.device)
        self.kv_cache, self.rule = kv_cache, rule
        self.layer = Layer(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            block_stride=keys.stride(0),
            head_stride=keys.stride(1),
            kv_heads=kv_heads,
            group=num_heads // kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            is_bf16=dtype == torch.bfloat16,
            window=rule.window or 0,
            chunk=rule.chunk or 0,
            pages=CODES.get(kv_cache.dtype, 0),
            k_scale=k_scale,
            v_scale=v_scale,
            scale=rule.scale,
            softcap=rule.softcap or 0.0,
            sinks=None if rule.sinks_N is None else rule.sinks_N.data_ptr(),
            slopes=None if rule.alibi_slopes_N is None else rule.alibi_slopes_N.data_ptr(),
        )


class PagedStep:
    """Where one step's queries stand, over one KV group's tables."""

    __slots__ = ("_kept", "step")

    def __init__(self, block_tables_SB: Tensor, query_start_loc_S1: Tensor, seq_lens_S: Tensor) -> None:
        """All int32."""
        self._kept = (block_tables_SB, query_start_loc_S1, seq_lens_S)
        self.step = Step(
            starts=query_start_loc_S1.data_ptr(),
            seq_lens=seq_lens_S.data_ptr(),
            tables=block_tables_SB.data_ptr(),
            table_stride=block_tables_SB.stride(0),
            num_seqs=seq_lens_S.shape[0],
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """How a step's attention is shared out among threads; the same for all layers that see as far and have as many
    heads. One thread at a time may attend by it."""

    plan: Plan
    memory: Tensor
    """Each thread's, int32."""
    kept: tuple[Tensor, ...]


def plan_attention(
    library: Library, pages: LayerPages, step: PagedStep, num_threads: int, *, any_lengths: bool = False
) -> AttentionPlan:
    """Cut what `pages`' layer attends to into tasks.

    `any_lengths`: sequences have one query each, and the plan has room for whatever lengths the step's tensors may say.
    """
    layer, rule = pages.layer, pages.rule
    arguments = (byref(step.step), layer.group, layer.kv_heads, rule.window or 0, rule.chunk or 0, num_threads)
    size = _most_tasks(library, step, num_threads) if any_lengths else library.plan_attention(*arguments, None)
    tasks = torch.empty((size.tasks, TASK_INTS), dtype=torch.int32)
    part = library.part(layer, size.queries)
    partials = torch.empty(size.slots * layer.kv_heads * part, dtype=torch.float32)
    counters = torch.zeros(size.tiles * layer.kv_heads, dtype=torch.int32)
    plan = Plan(tasks=tasks.data_ptr(), partials=partials.data_ptr(), counters=counters.data_ptr(), part=part)
    library.plan_attention(*arguments, byref(plan))
    memory = torch.empty((size.threads, library.room(layer)), dtype=torch.int32)
    return AttentionPlan(plan, memory, kept=(tasks, partials, counters))


def _most_tasks(library: Library, step: PagedStep, num_threads: int) -> PlanSize:
    """Of any sequences of one query each: each has a task, and what is cut has no more tasks than threads are given."""
    most = step.step.num_seqs + 2 * library.parts_per_thread * num_threads
    return PlanSize(tasks=most, slots=most, tiles=most, threads=num_threads, queries=1)


def attend(library: Library, pages: LayerPages, step: PagedStep, plan: AttentionPlan, q_TNH: Tensor) -> Tensor:
    """Attend causally over each sequence's context; [T, N, H] in q's dtype, that of `pages`, contiguous."""
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
    token, head, _ = q_TNH.stride()
    memory = plan.memory
    library.attend(
        pages.layer,
        step.step,
        plan.plan,
        q_TNH.data_ptr(),
        token,
        head,
        out_TNH.data_ptr(),
        memory.data_ptr(),
        memory.shape[1],
    )
    return out_TNH


def write_pages(
    library: Library, pages: LayerPages, k_TKH: Tensor, v_TKH: Tensor, slot_mapping_T: Tensor, num_threads: int
) -> None:
    """Put keys and values, of the type that `pages` says, into their slots; those of slot -1 nowhere."""
    k_token, k_head, _ = k_TKH.stride()
    v_token, v_head, _ = v_TKH.stride()
    num_tokens = k_TKH.shape[0]
    threads = min(num_threads, 1 + k_TKH.numel() // _WRITES_PER_THREAD)
    library.write_pages(
        pages.layer,
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        k_token,
        k_head,
        v_token,
        v_head,
        slot_mapping_T.data_ptr(),
        num_tokens,
        threads,
    )
