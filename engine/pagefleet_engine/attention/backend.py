"""The interface between a model and the paged KV cache.

A backend is made once per worker; `begin` turns a step's batch into an object that every layer calls.

Shapes: T tokens of the step, S sequences, B blocks per table; N query heads, K key/value heads, H head size. Of
latents: P the part of a head that does not rotate, R rank of the latent, V size of a value, W width of what a token
keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from pagefleet_kernels.quantize import Activations, QuantizeSpec
from pagefleet_kernels.score_rule import ScoreRule
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompiledMaps:
    """Products with the same numbers, laid out: by keys, [N, T, P] to [N, T, R], and by values, [N, T, R] to [N, T, V];
    what each is called with besides is filled."""

    absorb: Callable[[Tensor, Tensor], None]
    values: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class LatentMaps:
    """What keys and values of a rank's heads are made from a latent with (MLA, arXiv 2405.04434).

    A key is its first P numbers made from the latent, and behind them the part that all heads share, which is kept as
    it is: the last W - R of what is kept of a token.
    """

    made_NXR: Tensor
    """[N, P + V, R], contiguous: the part of a head's key over its value."""
    nope_dim: int
    """P."""
    compiled: CompiledMaps | None = None
    """Who multiplies by them on a CPU that has compiled kernels; None: torch."""

    @property
    def rank(self) -> int:
        """R."""
        return self.made_NXR.shape[2]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.made_NXR.shape[1] - self.nope_dim

    def absorb(self, q_TNH: Tensor) -> Tensor:
        """Queries [N, T, W] to be compared with what is kept, as `q . (A l) = (A^T q) . l`."""
        num_tokens, num_heads, head_dim = q_TNH.shape
        out_NTW = q_TNH.new_empty(num_heads, num_tokens, self.rank + head_dim - self.nope_dim)
        q_NTH = q_TNH.transpose(0, 1)
        q_NTP, out_NTR = q_NTH[..., : self.nope_dim], out_NTW[..., : self.rank]
        if self.compiled is not None:
            self.compiled.absorb(q_NTP, out_NTR)
        else:
            torch.bmm(q_NTP, self.made_NXR[:, : self.nope_dim], out=out_NTR)
        out_NTW[..., self.rank :] = q_NTH[..., self.nope_dim :]
        return out_NTW

    def values(self, latents_NTR: Tensor) -> Tensor:
        """Outputs [T, N, V], contiguous, from the latents' weighted sums."""
        if self.compiled is not None:
            num_heads, num_tokens, _ = latents_NTR.shape
            out_TNV = latents_NTR.new_empty(num_tokens, num_heads, self.value_dim)
            self.compiled.values(latents_NTR, out_TNV.transpose(0, 1))
            return out_TNV
        return torch.bmm(latents_NTR, self.made_NXR[:, self.nope_dim :].transpose(1, 2)).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """How one layer attends; made once, by the model."""

    layer: int
    scale: float
    window: int | None = None
    """Each token sees itself and the `window - 1` tokens before it; None: all."""
    chunk: int | None = None
    """Each token sees those of its own chunk of so many positions; None: all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`, before anything is hidden."""
    sinks_N: Tensor | None = None
    """float32 [N], one more logit per head that takes its share of the softmax and has no value."""
    alibi_slopes_N: Tensor | None = None
    """float32 [N], times the distance between query and key, subtracted from the score (Press et al., 2108.12409)."""
    k_scale: float = 1.0
    """Of a pool in 8 bits: a stored key times this is the key."""
    v_scale: float = 1.0
    latent: LatentMaps | None = None
    """Pages hold latents: one vector [W] of each token for all heads, scaled by `k_scale`."""

    @property
    def is_local(self) -> bool:
        """Whether a token may see less than everything before it."""
        return self.window is not None or self.chunk is not None

    @property
    def rule(self) -> ScoreRule:
        """The same for the kernels."""
        return ScoreRule(
            scale=self.scale,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks_N=self.sinks_N,
            alibi_slopes_N=self.alibi_slopes_N,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Where the tokens of one step stand: ragged queries over paged context. Tensors live on the worker's device.

    Rows are in batch order. A sequence's queries are its last `query_len` positions: token j of sequence s stands at
    position `seq_lens[s] - query_len[s] + j`. A sequence of length 0, with one query, is padding.
    """

    query_start_loc_S1: Tensor
    """int32 [S+1], running sum of query lengths."""
    seq_lens_S: Tensor
    """int32 [S], computed plus new tokens."""
    block_tables: tuple[Tensor, ...]
    """Per KV group, int32 [S, B]; entries that no query can see may be anything within the pool."""
    slot_mappings: tuple[Tensor, ...]
    """Per KV group, int64 [T], block_id * block_size + offset where each token's K/V is written; -1: nowhere."""
    max_query_len: int
    """A bound on the query lengths, on the host."""
    query_lens: list[int] | None = None
    """The lengths on the host, where they are known; None in a graph that serves many batches."""
    seq_lens: list[int] | None = None
    num_common_blocks: int = 0
    """Leading blocks that all rows share in the group of full attention, where that should be made use of."""

    def part(self, rows: range, tokens: range) -> BatchGeometry:
        """Of consecutive tokens, all of which are in these rows; the first and the last row may have others besides.
        Lengths must be known on the host."""
        assert self.query_lens is not None
        assert self.seq_lens is not None
        of_rows, of_tokens = slice(rows.start, rows.stop), slice(tokens.start, tokens.stop)
        before = tokens.start - sum(self.query_lens[: rows.start])
        behind = sum(self.query_lens[: rows.stop]) - tokens.stop
        query_lens, seq_lens = self.query_lens[of_rows], self.seq_lens[of_rows]
        query_lens[0] -= before
        query_lens[-1] -= behind
        seq_lens[-1] -= behind
        ends_S = self.query_start_loc_S1[rows.start + 1 : rows.stop + 1]
        starts_S1 = self.query_start_loc_S1[rows.start : rows.stop + 1] - tokens.start
        return replace(
            self,
            query_start_loc_S1=starts_S1.clamp_(0, len(tokens)),
            seq_lens_S=self.seq_lens_S[of_rows] - (ends_S - tokens.stop).clamp_(min=0),
            block_tables=tuple(aligned(table_SB[of_rows]) for table_SB in self.block_tables),
            slot_mappings=tuple(aligned(slots_T[of_tokens]) for slots_T in self.slot_mappings),
            max_query_len=max(query_lens),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )


def aligned(x: Tensor) -> Tensor:
    """The same, from an address that is a multiple of 16 bytes: for others Triton compiles its kernels anew."""
    return x.clone() if x.data_ptr() % 16 else x


@dataclass(frozen=True, slots=True)
class Pages:
    """Where one layer's new keys and values go, for a kernel that writes them itself."""

    kv_cache: Tensor
    """[num_blocks, 2, K, block_size, H], or of latents [num_blocks, 1, 1, block_size, W]: the layer's view of the pool,
    strided."""
    slot_mapping_T: Tensor
    """int64 [T]."""


class AttentionStep(Protocol):
    """Attention of one step, for all layers."""

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """Put the step's keys and values into the layer's pages; of latents [T, 1, W] there are no values."""
        ...

    def pages(self, spec: AttentionSpec) -> Pages:
        """The layer's pages, for a kernel that writes keys and values along the way."""
        ...

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """Attend causally over each sequence's context, whose keys and values are in the pages.

        Returns [T, N, H] in q's dtype, contiguous; [T, N, V] over latents.
        """
        ...


@runtime_checkable
class RoundingStep(Protocol):
    """A step whose kernels may round what they give for the product that follows."""

    def attend_rounded(self, spec: AttentionSpec, q_TNH: Tensor, rounding: QuantizeSpec) -> Activations:
        """As `AttentionStep.attend`, or the same rounded, its numbers [T, N * H], where that costs no launch."""
        ...


class AttentionBackend(Protocol):
    """Makes the steps; owns the KV pool."""

    def begin(self, batch: BatchGeometry) -> AttentionStep:
        """Prepare what all layers of this step share."""
        ...
