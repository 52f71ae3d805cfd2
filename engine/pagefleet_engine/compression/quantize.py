"""Quantizes a model layer by layer. What calibrates a layer has gone through those before it as they were quantized.

read a layer  ->  run it, watching what its matrices multiply  ->  round them  ->  run what was written  ->  next
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import regex
import torch
from torch import Tensor

from pagefleet_engine.compression.calibration import Text, num_tokens
from pagefleet_engine.compression.layer_rounding import LayerRounding
from pagefleet_engine.compression.recipe import Recipe
from pagefleet_engine.compression.report import MatrixReport, Report, Tried
from pagefleet_engine.compression.stages import KV_SCALES, Batch, LargestKV, Stages, in_batches, negative_log_likelihood
from pagefleet_engine.compression.stored import stored_bytes
from pagefleet_engine.compression.writer import REPORT, CheckpointWriter, write_config, write_json
from pagefleet_engine.config import DType
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Quantization, matches
from pagefleet_engine.loader.load import resolve_dtype
from pagefleet_engine.loader.new_folder import new_folder
from pagefleet_engine.loader.sharded import GIVE_THE_MODEL, check_whole
from pagefleet_engine.models.config_file import read_arch

_HEAD = "lm_head"
_SCALE = ".weight_scale"
_KEYS_WITHOUT_WEIGHTS = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Kinds of models whose keys are kept without the weights of their norm, as no other engine keeps them."""

Tell = Callable[[str], None]


@torch.inference_mode()
def quantize(folder: Path, recipe: Recipe, text: Text, output: Path, tell: Tell, dtype: DType = "auto") -> Report:
    """Write a quantized copy of a model.

    Args:
        folder: of the model.
        recipe: has been checked.
        text: in the model's tokens.
        output: as `new_folder` has it.
        tell: gets a line for each layer.
        dtype: that layers are computed in.

    Raises:
        ModelLoadError: the model cannot be read, or is quantized.
        ConfigError: it cannot be quantized so, or not be written.
    """
    started = time.perf_counter()
    check_whole(folder, GIVE_THE_MODEL)
    arch = read_arch(folder)
    if arch.quantization is not None:
        schemes = "; ".join(rule.scheme.describe() for rule in arch.quantization.rules)
        raise ModelLoadError(f"{folder} is quantized already ({schemes}): give the model in a float type")
    arch = arch.for_length(arch.default_length)
    stages = Stages(folder, arch, resolve_dtype(dtype, arch.dtype, torch.device("cpu")))
    layers = Layers(stages, recipe)
    with new_folder(output, layers.num_bytes, "--output") as scratch:
        writer = CheckpointWriter(scratch)
        run = _Run(layers, text)
        for layer in range(arch.num_layers):
            begun = time.perf_counter()
            writer.add(layers.stored(run.quantize(layer)))
            tell(f"layer {layer + 1} of {arch.num_layers}: {time.perf_counter() - begun:.1f} s")
        writer.copy(stages.files, layers.untouched - run.changed)
        writer.finish()
        write_config(folder, scratch, recipe.section(layers.left_out))
        report = Report(
            model=str(folder),
            recipe=recipe,
            calibration_tokens=num_tokens(text.calibration) if recipe.is_calibrated else 0,
            matrices=tuple(run.matrices),
            held_out=run.tried(),
            bytes_before=sum(file.path.stat().st_size for file in stages.files),
            bytes_after=writer.num_bytes,
            seconds=time.perf_counter() - started,
        )
        write_json(scratch / REPORT, report.as_json())
    return report


class Layers:
    """Which matrices of a model are quantized, under which names they are stored, and what that takes."""

    def __init__(self, stages: Stages, recipe: Recipe) -> None:
        """Raises ConfigError for a pattern that names nothing and for groups that do not divide, ModelLoadError for
        layers that the engine does not run in that form."""
        self.stages, self.recipe = stages, recipe
        if recipe.kv_dtype and stages.arch.model_type in _KEYS_WITHOUT_WEIGHTS:
            raise ConfigError(
                f"{stages.arch.model_type} keeps keys without the weights of their norm, so their scales would be "
                "wrong anywhere else: leave --kv-cache-scheme out"
            )
        plain = stages.shapes()
        _check_patterns(recipe.ignore, _linears(stages, ()))
        self.names = _linears(stages, recipe.ignore)
        """Of matrices that are quantized."""
        if not self.names:
            raise ConfigError("--ignore leaves no layer to quantize: name fewer")
        sizes = {name: plain[f"{name}.weight"] for name in self.names}
        size = recipe.group_size
        for name, shape in sorted(sizes.items()):
            if len(shape) > 2:
                raise ConfigError(f"{name} has all experts in one tensor, which is not quantized: --ignore the layer")
            if size is not None and shape[1] % size:
                raise ConfigError(
                    f"{name} has {shape[1]} inputs, which groups of {size} do not divide: give another --group-size, "
                    "-1 for whole rows, or --ignore the layer"
                )
        self.quantization = recipe.quantization((_HEAD, *recipe.ignore))
        _shapes(stages, self.quantization)
        self._stored = stages.stored_names(self.quantization)
        replaced = {self._stored[f"{name}.weight"] for name in self.names}
        found = {name: file for file in stages.files for name in file.names}
        self.untouched = frozenset(found.keys() - replaced)
        """Tensors, by the checkpoint's names."""
        matrices = [name for name in sorted(self.untouched) if name.endswith(".weight") and "embed" not in name]
        unquantized = [name.removesuffix(".weight") for name in matrices if len(found[name].shape(name)) == 2]
        self.left_out = list(dict.fromkeys([_HEAD, *unquantized]))
        """Matrices that stay as they are, by the checkpoint's names."""
        scale_bytes = stages.stored_dtype.itemsize
        self.num_bytes = sum(
            stored_bytes(rows, columns, recipe, scale_bytes) for rows, columns in sizes.values()
        ) + sum(math.prod(found[name].shape(name)) * _item_bytes(found[name].dtype(name)) for name in self.untouched)

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same under the checkpoint's names."""
        found = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            stored = self._stored.get(name)
            if stored is None:
                stored = f"{self._stored[f'{layer}.weight'].removesuffix('.weight')}.{kind}"
            found[stored] = tensor
        return found


class _Run:
    """What goes through the layers: calibration as they are quantized, other text through both."""

    def __init__(self, layers: Layers, text: Text) -> None:
        self._layers = layers
        self._calibration = in_batches(text.calibration) if layers.recipe.is_calibrated else []
        self._num_tokens = num_tokens(text.calibration)
        self._held_out, self._source = in_batches(text.held_out), text.source
        self._entering = _tokens(self._calibration)
        self._before, self._after = _tokens(self._held_out), _tokens(self._held_out)
        self._likelihoods: tuple[float, float] = (0.0, 0.0)
        self.matrices: list[MatrixReport] = []
        self.changed: frozenset[str] = frozenset()
        """Tensors besides those of quantized matrices that are not what they were, by the checkpoint's names."""

    def quantize(self, layer: int) -> dict[str, Tensor]:
        """All tensors of a layer that are new, by our names."""
        layers, stages = self._layers, self._layers.stages
        tensors = stages.read(layer)
        names = frozenset(name for name in layers.names if f"{name}.weight" in tensors)
        rounding = LayerRounding(stages, layers.recipe, layer, tensors, names)
        observer = rounding.observer(self._num_tokens)
        plain = stages.build(layer, tensors, observer=observer)
        largest = LargestKV()
        if self._calibration:
            left = stages.run(plain, self._entering, self._calibration, largest=largest)
            observer.is_open = False
            rounding.find_folds(left[:1], self._entering[:1], self._calibration[:1])
            del left
        self._before = stages.run(plain, self._before, self._held_out)
        is_last = layer == stages.arch.num_layers - 1
        before = negative_log_likelihood(plain, self._before, self._held_out) if is_last else 0.0
        del plain
        new, reports = rounding.round()
        self.matrices += reports
        self.changed |= layers.stored({name: tensor for name, tensor in new.items() if name in tensors}).keys()
        new |= self._kv_scales(layer, largest)
        quantized, kv_dtype = stages.build(layer, {**tensors, **new}, layers.quantization), layers.recipe.kv_dtype
        if self._calibration and not is_last:
            self._entering = stages.run(quantized, self._entering, self._calibration, kv_dtype=kv_dtype)
        self._after = stages.run(quantized, self._after, self._held_out, kv_dtype=kv_dtype)
        if is_last:
            self._likelihoods = before, negative_log_likelihood(quantized, self._after, self._held_out)
        return new

    def _kv_scales(self, layer: int, largest: LargestKV) -> dict[str, Tensor]:
        """Slots of the layer that the recipe fills, by our names; none unless it asks for them."""
        k_scale, v_scale = largest.scales()
        if not math.isfinite(k_scale + v_scale):
            raise ConfigError(
                f"keys or values of layer {layer} are no finite numbers under the calibration text: give --dtype "
                "float32, or another text"
            )
        names = self._layers.stages.kv_scale_names(layer, self._layers.quantization)
        return {name: torch.tensor([k_scale if name.endswith(KV_SCALES[0]) else v_scale]) for name in names}

    def tried(self) -> Tried:
        """Of the whole model."""
        count = sum(len(batch.token_ids_T) - len(batch.lengths) for batch in self._held_out)
        return Tried(count, *self._likelihoods, self._source, self._layers.stages.arch.vocab_size)


def _tokens(batches: Sequence[Batch]) -> list[Tensor]:
    return [batch.token_ids_T for batch in batches]


def _linears(stages: Stages, ignored: Sequence[str]) -> frozenset[str]:
    """Matrices that the engine would read quantized: tried with a form that divides any."""
    whole = Recipe(scheme="w8a16", algorithm="rtn").quantization((_HEAD, *ignored))
    return frozenset(name.removesuffix(_SCALE) for name in _shapes(stages, whole) if name.endswith(_SCALE))


def _shapes(stages: Stages, quantization: Quantization) -> dict[str, tuple[int, ...]]:
    try:
        return stages.shapes(quantization)
    except ModelLoadError as error:
        raise ConfigError(f"the model could not be run when it is quantized so: {error}; or --ignore it") from None


def _check_patterns(patterns: Sequence[str], names: frozenset[str]) -> None:
    for pattern in patterns:
        try:
            known = any(matches(pattern, name) for name in (*names, _HEAD))
        except regex.error as error:
            raise ConfigError(f"--ignore {pattern[:80]!a} is no regular expression ({error})") from None
        if not known:
            some = ", ".join(sorted(names)[:2])
            raise ConfigError(
                f"--ignore {pattern[:80]!a} names no layer: give a name such as {some}, part of one, or re: and an "
                "expression that matches from its start"
            )


def _item_bytes(dtype: str) -> int:
    """Of safetensors' name of a type, as in BF16."""
    return int("".join(regex.findall(r"\d+", dtype.partition("_")[0])) or 8) // 8
