"""One layer's matrices, rounded as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.compression.awq import Fold, find_scales, folded, folds_of
from pagefleet_engine.compression.gptq import Gptq
from pagefleet_engine.compression.grid import Rounded, round_blocks, round_to_nearest
from pagefleet_engine.compression.inputs import Gram, Inputs, Observer, Sample
from pagefleet_engine.compression.recipe import FP8_BLOCK, Recipe
from pagefleet_engine.compression.report import MatrixReport
from pagefleet_engine.compression.stages import Batch, Stages
from pagefleet_engine.compression.stored import stored_tensors
from pagefleet_engine.errors import ConfigError

_SAMPLED_TOKENS = 1024
_FOLDED_ERROR = 0.03
"""Of a layer's outputs in 16 bits, where its scales were moved about and nothing was rounded yet."""
_EXPERTS = ".experts."


class LayerRounding:
    """From a layer's tensors to those that are written."""

    def __init__(
        self, stages: Stages, recipe: Recipe, layer: int, tensors: dict[str, Tensor], names: frozenset[str]
    ) -> None:
        """`names`: of the matrices among the tensors that are quantized."""
        self._stages, self._recipe, self._layer = stages, recipe, layer
        self._tensors, self._names = tensors, names
        self._grid = recipe.grid(stages.stored_dtype)
        self._observer: Observer
        self._folded: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        """Of the inputs of matrices that AWQ found any for."""

    def observer(self, num_tokens: int) -> Observer:
        """Keeps what the algorithm needs of so many tokens; none are wanted by `rtn`."""
        make = Gram if self._recipe.algorithm == "gptq" else partial(Sample, -(-num_tokens // _SAMPLED_TOKENS))
        self._observer = Observer(self._names, make)
        return self._observer

    def find_folds(self, left: Sequence[Tensor], entering: Sequence[Tensor], batches: Sequence[Batch]) -> None:
        """Find AWQ's scales, and see that the layer gives what it gave.

        Raises:
            ConfigError: it does not.
        """
        if self._recipe.algorithm != "awq":
            return
        arch = self._stages.arch
        what = f"layer {self._layer} of {arch.model_type} has no place for AWQ's scales"
        prefixes = {name.partition(".self_attn.")[0] for name in self._names if ".self_attn." in name}
        for prefix in sorted(prefixes):
            for fold in folds_of(prefix, self._tensors, self._names, arch):
                scales_I = find_scales(fold, self._tensors, self._sample(fold), self._grid, self._recipe.group_size)
                self._scales |= dict.fromkeys(fold.readers, scales_I)
                now = {**self._tensors, **self._folded}
                self._folded |= folded(fold, scales_I, now, unit_offset=arch.model_type.startswith("gemma"))
        if not self._folded:
            raise ConfigError(f"{what}: give --algorithm gptq")
        model = self._stages.build(self._layer, {**self._tensors, **self._folded})
        (expected_TD,), (found_TD,) = left, self._stages.run(model, entering, batches)
        error = float((found_TD - expected_TD).float().norm() / expected_TD.float().norm())
        if not error < _FOLDED_ERROR:
            raise ConfigError(f"{what} (its outputs change by {error:.0%}): give --algorithm gptq")

    def round(self) -> tuple[dict[str, Tensor], list[MatrixReport]]:
        """The new tensors of quantized matrices, and others that changed; and what each lost.

        Raises:
            ConfigError: a matrix cannot be calibrated.
        """
        matrices = {f"{name}.weight" for name in self._names}
        new = {name: tensor for name, tensor in self._folded.items() if name not in matrices}
        reports = []
        for name in sorted(self._names):
            weight_OI = self._folded.get(f"{name}.weight", self._tensors[f"{name}.weight"]).float()
            inputs = self._inputs(name)
            try:
                rounded = self._rounded(weight_OI, inputs)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            new |= stored_tensors(name, rounded, self._recipe, self._stages.stored_dtype)
            lost_OI = rounded.weight().sub_(weight_OI)
            reports.append(self._report(name, lost_OI, weight_OI, inputs))
        return new, reports

    def _report(self, name: str, lost_OI: Tensor, weight_OI: Tensor, inputs: Inputs | None) -> MatrixReport:
        share = float(lost_OI.norm() / weight_OI.norm().clamp(min=torch.finfo(torch.float32).tiny))
        if inputs is None:
            return MatrixReport(name, share, None, 0)
        if name in self._scales:  # inputs were seen before these moved into the matrix
            lost_OI, weight_OI = lost_OI / self._scales[name], weight_OI / self._scales[name]
        whole = inputs.square_of(weight_OI)
        outputs = (inputs.square_of(lost_OI) / whole) ** 0.5 if whole > 0.0 else 0.0
        return MatrixReport(name, share, outputs, inputs.num_tokens)

    def _rounded(self, weight_OI: Tensor, inputs: Inputs | None) -> Rounded:
        recipe = self._recipe
        if isinstance(inputs, Gram):
            how = Gptq(
                grid=self._grid,
                group_size=recipe.group_size,
                actorder=recipe.actorder,
                dampening_frac=recipe.dampening_frac,
            )
            return how.round(weight_OI, inputs.gram_II)
        if recipe.scheme == "fp8-block":
            return round_blocks(weight_OI, self._grid, FP8_BLOCK)
        return round_to_nearest(weight_OI, self._grid, recipe.group_size)

    def _inputs(self, name: str) -> Inputs | None:
        """What the matrix multiplied; nothing, where its weights are made into others before anything is multiplied."""
        if self._recipe.algorithm == "rtn":
            return None
        inputs = self._observer.of(name)
        if inputs is None and _EXPERTS in name:
            raise ConfigError(
                f"{name}: no token of the calibration text goes to this expert: give more text "
                "(--num-calibration-samples, --max-seq-length, --calibration), or --algorithm rtn"
            )
        return inputs

    def _sample(self, fold: Fold) -> Sample:
        inputs = self._inputs(fold.readers[0])
        assert isinstance(inputs, Sample), "AWQ keeps samples, and every reader multiplies"
        return inputs
