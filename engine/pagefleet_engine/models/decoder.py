"""The frame of a decoder-only model: embedding, layers, final norm, head; or what a stage of a pipeline has of it.

Shapes: T tokens of the step, U those that a rank has of the residual stream, S rows asked for, D hidden size, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Self

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.embedding import Embedding, HeadForm, LMHead, PositionTable
from pagefleet_engine.layers.linear import Linear
from pagefleet_engine.layers.norm import Residual
from pagefleet_engine.layers.rotary import RotaryEmbedding
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import HasWeights, Placement, Weight, prefixed
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder_layer import DecoderLayer, block_norm, decoder_layer


class DecoderModel:
    """Implements `Model` for every family whose layers differ in `Traits` and `ModelArch` only."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement) -> None:
        layers, self._part_names = placement.own_layers(arch.num_layers), traits.names
        own = arch.of_layers(layers)
        ranks = placement.tensor
        self.arch = own.of_rank(ranks.index, ranks.size, whole_experts=placement.expert_parallel)
        self._names = [f"{traits.names.layers}.{layer}" for layer in layers]
        of_layers = replace(placement, transposed=traits.transposed)
        self._layers = [
            (decoder_layer(own, index, traits, of_layers.within(name)), own.layer_ropes[index])
            for index, name in enumerate(self._names)
        ]
        heads_of = (arch.rope_head_dim, arch.context_length, placement)
        self._rotaries = [RotaryEmbedding(rope, *heads_of) for rope in arch.ropes]
        self._tokens = token_ranks(placement)
        self._start: _Start | None = None
        self._embed_tokens: Embedding | None = None
        self._end: DecoderEnd | None = None
        self.on_layer: Callable[[], None] = _nothing
        """Is called as each layer's operations have been called, which is when a CPU has computed them."""
        is_first, is_last = layers.start == 0, layers.stop == arch.num_layers
        if is_first or (is_last and arch.tie_word_embeddings):
            width = arch.embedding_size or arch.hidden_size
            table_at = placement.within(traits.names.embedding)
            self._embed_tokens = Embedding(arch.vocab_size, width, table_at, traits.embedding_scale)
            if is_first:
                self._start = _Start(self._embed_tokens, arch, traits, placement)
        if is_last:
            self._end = DecoderEnd(arch, traits, placement, self._embed_tokens if arch.tie_word_embeddings else None)

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
            yield from prefixed(self._part_names.embedding, self._embed_tokens)
        if self._start is not None:
            yield from self._start.weights()
        for name, (layer, _) in zip(self._names, self._layers, strict=True):
            yield from prefixed(name, layer)
        if self._end is not None:
            yield from self._end.weights()

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """See Model."""
        if self._start is not None:
            stream: Residual = (self._start(entering, positions_T), None)
        else:
            stream = (self._tokens.own(entering), None)
        rotations = [rotary.at(positions_T) for rotary in self._rotaries]
        for layer, rope in self._layers:
            stream = layer(stream, rotations[rope], step)
            self.on_layer()
        if self._end is None or self._end.norm is None:
            total_UD, pending_UD = stream
            return self._tokens.gather(total_UD if pending_UD is None else total_UD.add_(pending_UD), len(positions_T))
        _, normed_TD = self._tokens.read(self._end.norm, stream, len(positions_T))
        assert isinstance(normed_TD, Tensor), "nothing is rounded unless asked for"
        return normed_TD

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """See Model."""
        assert self._end is not None, "the last stage has the head"
        return self._end.head(hidden_SD)


def _nothing() -> None:
    """Nobody wants to know."""


def where_kinds_meet(kinds: Sequence[Hashable]) -> list[int]:
    """Indices, ascending, that hold each kind behind each kind that it ever follows; and the first."""
    seen: set[tuple[Hashable, Hashable]] = set()
    kept = {0}
    for index, pair in enumerate(pairwise(kinds), 1):
        if pair not in seen:
            seen.add(pair)
            kept |= {index - 1, index}
    return sorted(kept)


class _Start:
    """What the first stage has before its layers."""

    def __init__(self, embed_tokens: Embedding, arch: ModelArch, traits: Traits, placement: Placement) -> None:
        hidden, names = arch.hidden_size, traits.names
        self._tokens, self._embed_tokens = token_ranks(placement), embed_tokens
        self._parts: list[tuple[str, HasWeights]] = []
        self._project_in = self._positions = self._norm = None
        if arch.embedding_size is not None:
            self._project_in = Linear(arch.embedding_size, (hidden,), False, placement.within(names.project_in))
            self._parts.append((names.project_in, self._project_in))
        if arch.position_rows:
            self._positions = PositionTable(arch.position_rows, hidden, placement, arch.position_offset)
            self._parts.append((names.positions, self._positions))
        if traits.embedding_norm:
            self._norm = block_norm(arch, traits, placement)
            self._parts.append((names.embedding_norm, self._norm))

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Without the embedding's."""
        for name, part in self._parts:
            yield from prefixed(name, part)

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """The residual stream of this rank's tokens, [U, D]."""
        hidden_UD = self._embed_tokens(token_ids_T)
        if self._project_in is not None:
            hidden_UD = self._project_in(hidden_UD)
        if self._positions is not None:
            hidden_UD = hidden_UD.add_(self._tokens.own(self._positions(positions_T)))
        return hidden_UD if self._norm is None else self._norm(hidden_UD)


class DecoderEnd:
    """What the last stage has behind its layers."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement, tied_to: Embedding | None) -> None:
        hidden, self._names = arch.hidden_size, traits.names
        self.norm = None if traits.layer_norms == "of sums" else block_norm(arch, traits, placement)
        self._project_out: Linear | None = None
        if arch.embedding_size is not None:
            place = placement.within(self._names.project_out)
            self._project_out = Linear(hidden, (arch.embedding_size,), False, place)
        self.head = LMHead(
            arch.vocab_size,
            arch.embedding_size or hidden,
            placement.within(self._names.head),
            tied_to=tied_to,
            form=HeadForm(bias=arch.head_bias, scale=arch.logit_scale, softcap=arch.final_softcap),
            inputs=self._project_out,
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Without a tied head's."""
        if self.norm is not None:
            yield from prefixed(self._names.norm, self.norm)
        if self._project_out is not None:
            yield from prefixed(self._names.project_out, self._project_out)
        yield from prefixed(self._names.head, self.head)
