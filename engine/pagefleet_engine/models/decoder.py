"""The frame of a decoder-only model: embedding, layers, final norm, head.

Shapes: T tokens of the step, S rows asked for, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.embedding import Embedding, LMHead
from pagefleet_engine.layers.norm import Residual, RMSNorm
from pagefleet_engine.layers.rotary import RotaryEmbedding
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder_layer import DecoderLayer, decoder_layer


class DecoderModel:
    """Implements `Model` for every family whose layers differ in `Traits` and `ModelArch` only."""

    def __init__(self, arch: ModelArch, traits: Traits, placement: Placement) -> None:
        self.arch = arch.of_rank(placement.tensor.index, placement.tensor.size)
        self._embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, placement, traits.embedding_scale)
        self._layers = [
            (decoder_layer(arch, layer, traits, placement.within(f"model.layers.{layer}")), rope)
            for layer, rope in enumerate(arch.layer_ropes)
        ]
        self._norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, placement, traits.norm_unit_offset)
        self._rotaries = [RotaryEmbedding(rope, arch.head_dim, arch.context_length, placement) for rope in arch.ropes]
        self._lm_head = LMHead(
            arch.vocab_size,
            arch.hidden_size,
            placement.within("lm_head"),
            tied_to=self._embed_tokens if arch.tie_word_embeddings else None,
            softcap=arch.final_softcap,
            scale=arch.logit_scale,
        )

    @property
    def divided_head(self) -> LMHead | None:
        """See Model."""
        return self._lm_head if self._lm_head.part is not None else None

    def replace_layers(self, replacement: Callable[[DecoderLayer], DecoderLayer]) -> None:
        """Put another form in the place of each layer, e.g. one that is compiled; once its weights have arrived."""
        self._layers = [(replacement(layer), rope) for layer, rope in self._layers]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See Model."""
        yield from prefixed("model.embed_tokens", self._embed_tokens)
        for index, (layer, _) in enumerate(self._layers):
            yield from prefixed(f"model.layers.{index}", layer)
        yield from prefixed("model.norm", self._norm)
        yield from prefixed("lm_head", self._lm_head)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """See Model."""
        stream: Residual = (self._embed_tokens(token_ids_T), None)
        rotations = [rotary.at(positions_T) for rotary in self._rotaries]
        for layer, rope in self._layers:
            stream = layer(stream, rotations[rope], step)
        _, hidden_TD = self._norm.read(stream)
        assert isinstance(hidden_TD, Tensor), "nothing is rounded unless asked for"
        return hidden_TD

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """See Model."""
        return self._lm_head(hidden_SD)
