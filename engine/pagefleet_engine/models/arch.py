"""A model's shape, as the files in `models/` build from it. Made by `config_file` from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pagefleet_kernels.expert_gates import Gate
from pagefleet_protocol.model_config.kv_spec import KVSpec
from pagefleet_protocol.model_config.stages import latest_start

from pagefleet_engine.layers.linear_kernel import Activation
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.quantization_scheme import Quantization
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.layers.shard import own_heads, shares
from pagefleet_engine.ranks.parallelism import Parallelism

LayerNorms = Literal["before", "around", "after", "shared", "apart", "of sums"]
"""Where attention and the MLP are normalised: what they read, what they give, or both; or they stand side by side and
read the layer's input through one norm ("shared") or two ("apart"); or the residual stream is, after each ("of sums").
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsArch:
    """The experts of a model, alike in every layer that has any."""

    routing: Routing
    intermediate_size: int
    """Of one expert."""
    shared_intermediate_size: int = 0
    """Of the MLP that every token goes through besides; 0: there is none."""
    gate: Gate | None = None
    """How gate and up are joined; None: by the activation of the MLPs."""
    layers: tuple[bool, ...]
    """Per layer: whether experts are in the place of its MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArch:
    """Attention over latents (MLA), alike in every layer. Widths are of one head; `rank` and `query_rank` of all."""

    rank: int
    """Of the latent that keys and values are made from."""
    query_rank: int | None
    """Of the one that queries are made from; None: they are made from the hidden state."""
    nope_dim: int
    """Part of a query and of a key that does not rotate."""
    rope_dim: int
    """Part that does; all heads share that of the key."""
    value_dim: int
    interleaved: bool
    """The checkpoint rotates neighbours against each other, not one half against the other."""
    maps_apart: bool = False
    """The maps to keys and to values are two tensors, the former transposed: as GGUF has them."""

    @property
    def spec(self) -> KVSpec:
        """What is kept of a token."""
        return KVSpec.latent(self.rank, self.rope_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpArch:
    """Several versions of the residual stream (AltUp, arXiv 2301.13310), and what else Gemma 3n has in its layers."""

    num_inputs: int
    """Versions of the stream."""
    active: int
    """The one that layers compute with."""
    correct_scale: bool
    """Whether it is scaled before it meets a layer's own input."""
    laurel_rank: int
    """Of the low-rank map beside attention."""
    per_layer_vocab_size: int
    per_layer_size: int
    """Width of what each layer gets of the tokens themselves."""
    num_layers: int
    """Of the whole model, also in a stage."""
    sparsity: tuple[float, ...]
    """Per layer: share of the MLP's gate that is cut off; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """What a configuration says, with every default and every old spelling settled."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    rms_norm_eps: float
    """Of norms of either kind."""
    activation: Activation
    """Of the gate of the MLP, or of its first matrix."""
    mlp_gate: bool = True
    """Whether the MLP has a gate beside its first matrix."""
    query_scale: float
    """Multiplies the products of queries and keys."""
    attention_softcap: float | None = None
    """Bounds these products, softly: cap * tanh(score / cap)."""
    final_softcap: float | None = None
    """Bounds the logits in the same way."""
    ropes: tuple[RopeParameters, ...]
    """The different rotations of the model."""
    layer_ropes: tuple[int, ...]
    """Per layer: which of them it uses."""
    windows: tuple[int | None, ...]
    """Per layer: how many tokens each token sees at most, itself included; None for all."""
    chunked: bool = False
    """Windows do not slide but are chunks: a token sees what is of its own chunk of so many tokens."""
    num_kv_shared_layers: int = 0
    """The last layers, that keep nothing of a token: each reads what the last layer before them keeps that has its kind
    of window and rotation."""
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    context_length: int
    """Most positions the model was made for, rope scaling included."""
    default_length: int
    """Longest sequence to serve unless asked for: the context length, or less where more would cost quality."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; empty when the configuration names none."""
    dtype: str
    """Type of the checkpoint as the configuration names it, e.g. `bfloat16`; float32 when it does not."""
    latent: LatentArch | None = None
    """None: keys and values are kept as they are."""
    experts: ExpertsArch | None = None
    """None: every layer has an MLP."""
    altup: AltUpArch | None = None
    """None: the residual stream is one."""
    layer_norms: LayerNorms = "before"
    """Where layers normalise, in families that leave it to the configuration."""
    merged_qkv: bool = False
    """Queries, keys and values are one matrix in the checkpoint, in families whose checkpoints differ."""
    clip_qkv: float | None = None
    """Bounds queries, keys and values."""
    alibi_slopes: tuple[float, ...] = ()
    """Per query head: what a score loses for each position between query and key."""
    position_rows: int = 0
    """Rows of a table of learned positions; 0: there is none."""
    position_offset: int = 0
    """The row of the first position."""
    embedding_size: int | None = None
    """Width of the embedding, from and to which hidden states are projected; None: they are as wide."""
    head_bias: bool = False
    query_key_norm: bool = False
    """Normalise queries and keys, in families that leave it to the configuration."""
    logit_scale: float = 1.0
    """Multiplies the logits before a soft cap."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    embedding_scale: float = 1.0
    """Multiplies the embedding's rows."""
    unused_weights: tuple[str, ...] = ()
    """Beginnings of the names of tensors that the checkpoint has and the model does not need."""
    gguf_layout: bool = False
    """Matrices are as GGUF has them where the family's checkpoints differ: each expert's for itself, a row for each
    output, and queries, keys and values after one another."""
    steps_together: bool = False
    """Whether layers exchange something among the data ranks, so that all of them compute each step."""
    quantization: Quantization | None = None
    """Which of the checkpoint's matrices are stored in eight bits."""

    @property
    def kv(self) -> KVSpec:
        """What each layer keeps of a token; in a rank's part of the model, what the rank does."""
        return self.latent.spec if self.latent is not None else KVSpec.pairs(self.num_kv_heads, self.head_dim)

    @property
    def kept_windows(self) -> tuple[int | None, ...]:
        """Windows of the layers that keep something."""
        return self.windows[: self.num_layers - self.num_kv_shared_layers]

    @property
    def latest_start(self) -> int:
        """The last layer that a stage of a pipeline may begin with: what later ones read is kept behind it."""
        return latest_start(self.layer_ropes, self.num_kv_shared_layers)

    @property
    def passed_width(self) -> int:
        """Numbers of a token that a stage of a pipeline gives the next."""
        if self.altup is None:
            return self.hidden_size
        return self.altup.num_inputs * self.hidden_size + self.altup.num_layers * self.altup.per_layer_size

    @property
    def rope_head_dim(self) -> int:
        """Size of the heads that rotations are for."""
        return self.latent.rope_dim if self.latent is not None else self.head_dim

    @property
    def value_dim(self) -> int:
        """Of a head's output."""
        return self.latent.value_dim if self.latent is not None else self.head_dim

    def of_rank(self, rank: int, ranks: int, *, whole_experts: bool = False) -> ModelArch:
        """What one of so many tensor ranks computes, to reckon its memory with; the vocabulary stays whole.

        `whole_experts`: ranks do not divide experts, but have some of them each.

        Raises:
            ConfigError: the heads, the vocabulary or the MLP do not divide.
        """
        heads, kv_heads = own_heads(self.num_heads, self.num_kv_heads, rank, ranks)
        shares(self.vocab_size, ranks, "a vocabulary")
        width = len(shares(self.intermediate_size, ranks, "an MLP")[rank])
        experts = self.experts
        if experts is not None:
            if not whole_experts:
                own = shares(experts.intermediate_size, ranks, "an expert's MLP")[rank]
                experts = replace(experts, intermediate_size=len(own))
            if experts.shared_intermediate_size:
                own = shares(experts.shared_intermediate_size, ranks, "a shared expert's MLP")[rank]
                experts = replace(experts, shared_intermediate_size=len(own))
        slopes = tuple(self.alibi_slopes[head] for own in heads.ranges for head in own) if self.alibi_slopes else ()
        return replace(
            self,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            intermediate_size=width,
            alibi_slopes=slopes,
            experts=experts,
        )

    def of_layers(self, layers: range) -> ModelArch:
        """What a stage with these layers computes."""
        own = slice(layers.start, layers.stop)
        experts = self.experts and replace(self.experts, layers=self.experts.layers[own])
        altup = self.altup and replace(self.altup, sparsity=self.altup.sparsity[own])
        return replace(
            self,
            num_layers=len(layers),
            layer_ropes=self.layer_ropes[own],
            windows=self.windows[own],
            num_kv_shared_layers=max(0, layers.stop - max(layers.start, len(self.kept_windows))),
            experts=experts,
            altup=altup,
        )

    def stage_layers(self, parallel: Parallelism) -> Sequence[range]:
        """Each stage's layers. Raises ConfigError where the model cannot be divided so."""
        return parallel.stage_layers(self.num_layers, self.latest_start)

    def for_length(self, length: int) -> ModelArch:
        """The same for sequences of at most `length` tokens: settles what depends on it.

        A window that no sequence outgrows is none. LongRoPE takes its long factors when `length` passes the context
        that the model was first trained for, else its short ones, for all sequences alike: a key in the cache is then
        right for every sequence that it may become part of.
        """
        return replace(
            self,
            context_length=length,
            default_length=length,
            windows=tuple(None if window is None or window >= length else window for window in self.windows),
            ropes=tuple(replace(rope, longest=length) for rope in self.ropes),
        )
