"""Gemma 3n, its text model (Google, 2025): the residual stream in several versions (`altup`), inputs of each layer's
own that are looked up by token, and last layers that read the keys and values of earlier ones.

A checkpoint of text, images and sound (`model_type` gemma3n) is served as a text model; other weights are not loaded.
Shapes: T tokens of the step, U those that a rank has of the residual stream, A versions of it, D hidden size, L layers,
P width of a layer's own input, S rows asked for, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Self

import torch
from pagefleet_protocol.model_config.fields import ConfigFields
from pagefleet_protocol.model_config.shape import ModelShape
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.embedding import Embedding, LMHead
from pagefleet_engine.layers.linear import Linear
from pagefleet_engine.layers.norm import RMSNorm
from pagefleet_engine.layers.rotary import RotaryEmbedding
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.altup import JoinedVersions, SplitVersions
from pagefleet_engine.models.arch import AltUpArch, ModelArch
from pagefleet_engine.models.blocks import Attention, Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderEnd, where_kinds_meet
from pagefleet_engine.models.gemma3 import ends_of_text, ropes_by_kind
from pagefleet_engine.models.gemma3n_layer import Gemma3nLayer

_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""Where a configuration says nothing, and has more layers than that."""
_NOT_SHARED = ("k_proj", "v_proj", "k_norm", "v_norm")

_log = logging.getLogger(__name__)


def read(shape: ModelShape) -> ModelArch:
    """Four layers have a window to each without, unless `layer_types` says otherwise. Of a configuration with images
    and sound the part about text counts.

    Layers that read the keys and values of others have matrices for their own in published checkpoints: left over.
    """
    fields, num_layers = shape.fields, shape.num_layers
    reading = range(num_layers - shape.num_kv_shared_layers, num_layers)
    return replace(
        read_shared(
            shape,
            activation_field="hidden_activation",
            intermediate_size=fields.one_count("intermediate_size", num_layers),
            ropes=ropes_by_kind(shape),
        ),
        query_scale=1.0,
        final_softcap=fields.optional_number("final_logit_softcapping"),
        layer_ropes=tuple(0 if window is None else 1 for window in shape.windows),
        mlp_bias=False,
        eos_token_ids=ends_of_text(shape),
        altup=_altup(fields, num_layers),
        unused_weights=tuple(f"model.layers.{layer}.self_attn.{name}." for layer in reading for name in _NOT_SHARED),
    )


def _altup(fields: ConfigFields, num_layers: int) -> AltUpArch:
    if fields.present("activation_sparsity_pattern"):
        sparsity = fields.fractions("activation_sparsity_pattern", num_layers)
    else:
        num_sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        sparsity = (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    num_inputs = fields.count("altup_num_inputs", low=2)
    return AltUpArch(
        num_inputs=num_inputs,
        active=fields.count("altup_active_idx", low=0, high=num_inputs - 1),
        correct_scale=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.count("laurel_rank"),
        per_layer_vocab_size=fields.count("vocab_size_per_layer_input"),
        per_layer_size=fields.count("hidden_size_per_layer_input"),
        num_layers=num_layers,
        sparsity=sparsity,
    )


def build(arch: ModelArch, placement: Placement) -> Gemma3nModel:
    """A configuration may add biases to all of attention."""
    if arch.model_type == "gemma3n":
        _log.info("gemma3n: only the text model is loaded, requests cannot contain images or sound")
    return Gemma3nModel(arch, placement)


class Gemma3nModel:
    """Implements `Model`; or what a stage of a pipeline has of it. The first one makes the inputs of all layers, and
    stages give each other these beside the versions of the stream."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        layers = placement.own_layers(arch.num_layers)
        own, ranks, bias = arch.of_layers(layers), placement.tensor, arch.attention_bias
        altup = own.altup
        assert altup is not None, "the family reads it"
        traits = Traits(qkv_bias=bias, output_bias=bias, query_key_norm="heads")
        self.arch = own.of_rank(ranks.index, ranks.size)
        """See Model."""
        self._tokens, self._numbers, self._altup = token_ranks(placement), layers, altup
        self._layers = list(enumerate(_layers(own, altup, traits, placement, layers.start)))
        self._rotaries = [RotaryEmbedding(rope, arch.head_dim, arch.context_length, placement) for rope in arch.ropes]
        self._embed_tokens: Embedding | None = None
        self._start: _Start | None = None
        self._join: JoinedVersions | None = None
        self._end: DecoderEnd | None = None
        is_first, is_last = layers.start == 0, layers.stop == arch.num_layers
        if is_first or (is_last and arch.tie_word_embeddings):
            table_at = placement.within("model.embed_tokens")
            self._embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, table_at, arch.hidden_size**0.5)
            if is_first:
                self._start = _Start(self._embed_tokens, arch, altup, placement.within("model"))
        if is_last:
            tied_to = self._embed_tokens if arch.tie_word_embeddings else None
            self._join = JoinedVersions(arch, altup, placement.within("model"))
            self._end = DecoderEnd(arch, traits, placement, tied_to)

    @property
    def divided_head(self) -> LMHead | None:
        """See Model."""
        return self._end.head if self._end is not None and self._end.head.part is not None else None

    def excerpt(self) -> Self:
        """See Model."""
        found, kinds = copy.copy(self), [self._kind(place) for place in range(len(self._layers))]
        found._layers = [self._layers[place] for place in where_kinds_meet(kinds)]
        return found

    def _kind(self, place: int) -> Hashable:
        """Equal for two layers that launch the same kernels on tensors of the same forms."""
        index, layer = self._layers[place]
        forms = [(name, weight.part_shapes, weight.dtype, weight.kept) for name, weight in layer.weights()]
        is_cut = self._altup.sparsity[index] > 0.0
        return self.arch.layer_ropes[index], self.arch.windows[index], is_cut, tuple(forms)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See Model."""
        if self._embed_tokens is not None:
            yield from prefixed("model.embed_tokens", self._embed_tokens)
        if self._start is not None:
            yield from prefixed("model", self._start)
        for index, layer in self._layers:
            yield from prefixed(f"model.layers.{self._numbers[index]}", layer)
        if self._join is not None and self._end is not None:
            yield from prefixed("model", self._join)
            yield from self._end.weights()

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """See Model."""
        stream_UAD, inputs_ULP = self._taken(entering) if self._start is None else self._start(entering)
        rotations = [rotary.at(positions_T) for rotary in self._rotaries]
        for index, layer in self._layers:
            rotation = rotations[self.arch.layer_ropes[index]]
            stream_UAD = layer(stream_UAD, inputs_ULP[:, self._numbers[index]], rotation, step)
        if self._join is None or self._end is None or self._end.norm is None:
            given_UX = torch.cat((stream_UAD.flatten(1), inputs_ULP.flatten(1)), 1)
            return self._tokens.gather(given_UX, len(positions_T))
        return self._tokens.gather(self._end.norm(self._join(stream_UAD)), len(positions_T))

    def _taken(self, given_TX: Tensor) -> tuple[Tensor, Tensor]:
        """What the stage before gave, of this rank's tokens."""
        given_UX, altup = self._tokens.own(given_TX), self._altup
        width = altup.num_inputs * self.arch.hidden_size
        stream_UAD = given_UX[:, :width].contiguous().view(-1, altup.num_inputs, self.arch.hidden_size)
        return stream_UAD, given_UX[:, width:].view(-1, altup.num_layers, altup.per_layer_size)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """See Model."""
        assert self._end is not None, "the last stage has the head"
        return self._end.head(hidden_SD)


def _layers(
    arch: ModelArch, altup: AltUpArch, traits: Traits, placement: Placement, start: int
) -> Iterator[Gemma3nLayer]:
    """Of a stage whose first layer has the number `start` in the model."""
    kept_by: dict[int, Attention] = {}
    num_keeping = len(arch.kept_windows)
    for index, kind in enumerate(arch.layer_ropes):
        within = placement.within(f"model.layers.{start + index}")
        layer = Gemma3nLayer(arch, altup, index, traits, within, kept_by[kind] if index >= num_keeping else None)
        if isinstance(layer.attention, Attention):
            kept_by[kind] = layer.attention
        yield layer


class _Start:
    """From tokens to the versions of the stream, and to the inputs of all layers; the embedding's weights are told
    elsewhere, as it may be the head as well."""

    def __init__(self, embed_tokens: Embedding, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        self._embed_tokens = embed_tokens
        self._inputs = _LayerInputs(arch, altup, placement)
        self._split = SplitVersions(arch, altup, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._inputs.weights()
        yield from self._split.weights()

    def __call__(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """[U, A, D] and [U, L, P]."""
        embedded_UD = self._embed_tokens(token_ids_T)
        inputs_ULP = self._inputs(token_ids_T, embedded_UD)
        return self._split(embedded_UD), inputs_ULP


class _LayerInputs:
    """What each layer gets of the tokens themselves: a row of a second table, and a projection of the embedding."""

    def __init__(self, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        """Ranks divide the table; each has the projection."""
        size, width = altup.per_layer_size, arch.num_layers * altup.per_layer_size
        self._num_rows, self._shape = altup.per_layer_vocab_size, (-1, arch.num_layers, size)
        table_at = placement.within("embed_tokens_per_layer")
        self._table = Embedding(altup.per_layer_vocab_size, width, table_at, size**0.5)
        self._scale = arch.hidden_size**-0.5
        self._projection = Linear(arch.hidden_size, (width,), False, placement.within("per_layer_model_projection"))
        self._norm = RMSNorm(size, arch.rms_norm_eps, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("embed_tokens_per_layer", self._table)
        yield from prefixed("per_layer_model_projection", self._projection)
        yield from prefixed("per_layer_projection_norm", self._norm)

    def __call__(self, token_ids_T: Tensor, embedded_UD: Tensor) -> Tensor:
        """[U, L, P]; of a token that the table lacks, the row of token 0."""
        rows_ULP = self._table(token_ids_T.where(token_ids_T < self._num_rows, 0)).view(self._shape)
        projected_ULP = self._projection(embedded_UD).mul_(self._scale).view(self._shape)
        return self._norm(projected_ULP).add_(rows_ULP).mul_(2.0**-0.5)
