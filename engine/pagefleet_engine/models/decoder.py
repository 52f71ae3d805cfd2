"""The frame of a decoder-only model: embedding, layers, final norm, head; or what a stage of a pipeline has of it.

Shapes: T tokens of the step, U those that a rank has of the residual stream, S rows asked for, D hidden size, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.embedding import Embedding, LMHead
from pagefleet_engine.layers.norm import Residual, RMSNorm
from pagefleet_engine.layers.rotary import RotaryEmbedding
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder_layer import DecoderLayer, decoder_layer


class DecoderModel:
    """Implements `Model` for every family whose layers differ in `Traits` and `ModelArch` only."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement) -> None:
        layers = placement.own_layers(arch.num_layers)
        own = arch.of_layers(layers)
        self.arch = own.of_rank(placement.tensor.index, placement.tensor.size)
        self._layers = [
            (decoder_layer(own, index, traits, placement.within(f"model.layers.{layer}")), own.layer_ropes[index])
            for index, layer in enumerate(layers)
        ]
        self._names = [f"model.layers.{layer}" for layer in layers]
        heads_of = (arch.rope_head_dim, arch.context_length, placement)
        self._rotaries = [RotaryEmbedding(rope, *heads_of) for rope in arch.ropes]
        self._tokens = token_ranks(placement)
        self._is_first, is_last = layers.start == 0, layers.stop == arch.num_layers
        self._embed_tokens: Embedding | None = None
        self._end: _End | None = None
        if self._is_first or (is_last and arch.tie_word_embeddings):
            self._embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, placement, traits.embedding_scale)
        if is_last:
            self._end = _End(
                RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement, traits.norm_unit_offset),
                LMHead(
                    arch.vocab_size,
                    arch.hidden_size,
                    placement.within("lm_head"),
                    tied_to=self._embed_tokens if arch.tie_word_embeddings else None,
                    softcap=arch.final_softcap,
                    scale=arch.logit_scale,
                ),
            )

    @property
    def divided_head(self) -> LMHead | None:
        """See Model."""
        return self._end.head if self._end is not None and self._end.head.part is not None else None

    def replace_layers(self, replacement: Callable[[DecoderLayer], DecoderLayer]) -> None:
        """Put another form in the place of each layer, e.g. one that is compiled; once its weights have arrived."""
        self._layers = [(replacement(layer), rope) for layer, rope in self._layers]

    def excerpt(self) -> Self:
        """See Model."""
        kept = where_kinds_meet([self._kind(index) for index in range(len(self._layers))])
        found = copy.copy(self)
        found._layers = [self._layers[index] for index in kept]
        found._names = [self._names[index] for index in kept]
        return found

    def _kind(self, index: int) -> Hashable:
        """Equal for two layers that launch the same kernels on tensors of the same forms."""
        layer, rope = self._layers[index]
        forms = [(name, weight.part_shapes, weight.dtype, weight.kept) for name, weight in layer.weights()]
        return rope, self.arch.windows[index], tuple(forms)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See Model."""
        if self._embed_tokens is not None:
            yield from prefixed("model.embed_tokens", self._embed_tokens)
        for name, (layer, _) in zip(self._names, self._layers, strict=True):
            yield from prefixed(name, layer)
        if self._end is not None:
            yield from prefixed("model.norm", self._end.norm)
            yield from prefixed("lm_head", self._end.head)

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """See Model."""
        if self._is_first:
            assert self._embed_tokens is not None, "the first stage has the embedding"
            stream: Residual = (self._embed_tokens(entering), None)
        else:
            stream = (self._tokens.own(entering), None)
        rotations = [rotary.at(positions_T) for rotary in self._rotaries]
        for layer, rope in self._layers:
            stream = layer(stream, rotations[rope], step)
        if self._end is None:
            total_UD, pending_UD = stream
            return self._tokens.gather(total_UD if pending_UD is None else total_UD.add_(pending_UD), len(positions_T))
        _, normed_TD = self._tokens.read(self._end.norm, stream, len(positions_T))
        assert isinstance(normed_TD, Tensor), "nothing is rounded unless asked for"
        return normed_TD

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """See Model."""
        assert self._end is not None, "the last stage has the head"
        return self._end.head(hidden_SD)


def where_kinds_meet(kinds: Sequence[Hashable]) -> list[int]:
    """Indices, ascending, that hold each kind behind each kind that it ever follows; and the first."""
    seen: set[tuple[Hashable, Hashable]] = set()
    kept = {0}
    for index, pair in enumerate(pairwise(kinds), 1):
        if pair not in seen:
            seen.add(pair)
            kept |= {index - 1, index}
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class _End:
    """What the last stage has behind its layers."""

    norm: RMSNorm
    head: LMHead
