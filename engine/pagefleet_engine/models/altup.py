"""Alternating updates (AltUp, Baykal et al., arXiv 2301.13310), as Gemma 3n has them: the residual stream in several
versions, of which a layer computes one. The others are predicted from all of them before, and corrected by it after.

Shapes: U tokens that a rank has of the residual stream, A versions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_engine.layers.linear import Linear
from pagefleet_engine.layers.norm import RMSNorm
from pagefleet_engine.layers.weight import Placement, Weight, prefixed
from pagefleet_engine.models.arch import AltUpArch, ModelArch

_LEAST_SQUARE = 1e-5


class AltUp:
    """Of one layer. Its matrices are a few numbers: every rank has them, in the model's own type."""

    def __init__(self, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        hidden, num = arch.hidden_size, altup.num_inputs
        self._altup, self._hidden = altup, hidden
        self._router_norm = RMSNorm(hidden, arch.rms_norm_eps, placement)
        self._values: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, int | None]] = {
            "modality_router.weight": (num, hidden),
            "prediction_coefs.weight": (num * num, num),
            "correction_coefs.weight": (num, num),
            "correct_output_scale": (hidden, None),
        }
        self._slots = {
            name: Weight((rows,), columns, placement, partial(self._values.__setitem__, name))
            for name, (rows, columns) in shapes.items()
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from prefixed("router_norm", self._router_norm)
        yield from self._slots.items()

    def predict(self, stream_UAD: Tensor) -> Tensor:
        """Each version plus a mix of all: a new tensor."""
        num = self._altup.num_inputs
        modalities_UA = self._modalities(self.of(stream_UAD))
        mix_UAA = F.linear(modalities_UA, self._values["prediction_coefs.weight"]).view(-1, num, num)
        return torch.baddbmm(stream_UAD, mix_UAA, stream_UAD)

    def correct(self, predicted_UAD: Tensor, computed_UD: Tensor) -> Tensor:
        """Each version plus its share of what the prediction was off by, in place."""
        modalities_UA = self._modalities(computed_UD)
        shares_UA = F.linear(modalities_UA, self._values["correction_coefs.weight"]).add_(1.0)
        innovation_UD = computed_UD - self.of(predicted_UAD)
        return predicted_UAD.addcmul_(innovation_UD.unsqueeze(1), shares_UA.unsqueeze(2))

    def of(self, stream_UAD: Tensor) -> Tensor:
        """The version that the layer computes, [U, D]: a view."""
        return stream_UAD[:, self._altup.active]

    def scaled(self, corrected_UAD: Tensor) -> Tensor:
        """What the layer's own input meets of that, [U, D], contiguous."""
        active_UD = self.of(corrected_UAD)
        return active_UD * self._values["correct_output_scale"] if self._altup.correct_scale else active_UD.contiguous()

    def _modalities(self, x_UD: Tensor) -> Tensor:
        routed_UA = F.linear(self._router_norm(x_UD).mul_(1.0 / self._hidden), self._values["modality_router.weight"])
        return routed_UA.float().tanh_().to(x_UD.dtype)


class SplitVersions:
    """From the embedding to all versions of the stream; each but the first is a projection, scaled to its length."""

    def __init__(self, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        self._projections = _projections("altup_projections", arch, altup, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, layer in self._projections.items():
            yield from prefixed(name, layer)

    def __call__(self, embedded_UD: Tensor) -> Tensor:
        """[U, A, D]."""
        length_U1 = _length(embedded_UD)
        others = [_scaled(layer(embedded_UD), length_U1) for layer in self._projections.values()]
        return torch.stack((embedded_UD, *others), dim=1)


class JoinedVersions:
    """From all versions of the stream to one hidden state, by the same projections the other way."""

    def __init__(self, arch: ModelArch, altup: AltUpArch, placement: Placement) -> None:
        self._projections = _projections("altup_unembed_projections", arch, altup, placement)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        for name, layer in self._projections.items():
            yield from prefixed(name, layer)

    def __call__(self, stream_UAD: Tensor) -> Tensor:
        """[U, D]: the mean."""
        first_UD, *rest = stream_UAD.unbind(1)
        length_U1, layers = _length(first_UD), self._projections.values()
        others = [_scaled(layer(x_UD.contiguous()), length_U1) for layer, x_UD in zip(layers, rest, strict=True)]
        return torch.stack((first_UD, *others)).mean(0)


def _projections(name: str, arch: ModelArch, altup: AltUpArch, placement: Placement) -> dict[str, Linear]:
    """Of all versions but the first, by name."""
    hidden, names = arch.hidden_size, [f"{name}.{number}" for number in range(altup.num_inputs - 1)]
    return {name: Linear(hidden, (hidden,), False, placement.within(name)) for name in names}


def _length(x_UD: Tensor) -> Tensor:
    return x_UD.square().mean(-1, keepdim=True).sqrt_()


def _scaled(x_UD: Tensor, length_U1: Tensor) -> Tensor:
    """`x`, as long as told; may overwrite it."""
    own_U1 = x_UD.square().mean(-1, keepdim=True).clamp_(min=_LEAST_SQUARE).sqrt_()
    return x_UD.mul_(length_U1).div_(own_U1)
