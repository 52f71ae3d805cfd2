"""What the worker and the loader need of a model.

Shapes: T tokens of the step, S rows asked for, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.layers.weight import Weight
from pagefleet_engine.models.arch import ModelArch


class Model(Protocol):
    """A causal language model over a paged KV cache; call it within `torch.inference_mode()`."""

    @property
    def arch(self) -> ModelArch:
        """The shape that it was built from."""
        ...

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """Hidden states [T, D] after the final norm, of tokens (int32 or int64) at their positions (the same)."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V] in the model's dtype, for those rows of the hidden states that are asked for."""
        ...

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every slot to fill, named as in Hugging Face checkpoints save for merged ones (`loader.weight_map`)."""
        ...
