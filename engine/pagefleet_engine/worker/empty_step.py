"""A step without tokens: what a rank computes that has none, while others that it exchanges something with have."""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, Pages
from pagefleet_engine.worker.forward import CausalModel


class _NoTokens:
    """Implements `AttentionStep`: there is nothing to write or to attend to."""

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""

    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep; asked for by kernels of GPUs alone."""
        raise NotImplementedError("a step without tokens on a GPU")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        return q_TNH if spec.latent is None else q_TNH.new_empty(0, q_TNH.shape[1], spec.latent.value_dim)


@torch.inference_mode()
def compute_nothing(model: CausalModel, entering: Tensor) -> None:
    """Run a model's layers, and all that they exchange, over no tokens; `entering` is what enters of them, none."""
    model.forward(entering, torch.zeros(0, dtype=torch.int64, device=entering.device), _NoTokens())
