"""From a model's config.json to what planning needs of it. Pure, and without the engine: the operator has no torch.

The engine reads the same files in `pagefleet_engine.models`; a test compares the two for every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_protocol.model_facts import ModelFacts

from pagefleet_operator.download.config_values import ConfigValues
from pagefleet_operator.download.errors import BadModel

_MAX_LAYERS = 4096
_SLIDING = "sliding_attention"
_KINDS = ("full_attention", _SLIDING)
_QUANTIZED_TYPES = {"float": "fp8", "int": "int8"}

_Windows = Callable[[ConfigValues, int], tuple[int, int]]
"""From a configuration and its number of layers: how many of them have a window, and of how many tokens."""


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """The facts that are in the configuration alone."""

    architecture: str
    dtype: str
    quantization: str
    num_layers: int
    num_window_layers: int
    window: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    default_length: int

    def of_model(self, *, revision: str, weights_bytes: int, num_files: int) -> ModelFacts:
        """Add what the files tell."""
        return ModelFacts(
            revision=revision,
            weights_bytes=weights_bytes,
            num_files=num_files,
            architecture=self.architecture,
            dtype=self.dtype,
            quantization=self.quantization,
            num_layers=self.num_layers,
            num_window_layers=self.num_window_layers,
            window=self.window,
            num_attention_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            default_length=0 if self.default_length == self.max_position_embeddings else self.default_length,
        )


def read_config(config: Mapping[str, Any], source: str) -> ConfigFacts:
    """The facts in a configuration; `source` names it in errors.

    Raises:
        BadModel: a value cannot be, or pagefleet does not run this kind of model.
    """
    values = ConfigValues(config, source)
    architecture = values.text("model_type", "")
    family = _FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(_FAMILIES)
        raise BadModel(f"{source}: model_type is {architecture[:80] or 'not given'}; pagefleet runs {supported}")
    if architecture == "gemma3":  # text and images; the text model is served
        values = values.section("text_config", ("dtype", "torch_dtype", "quantization_config"))
    values = values.with_defaults(family.defaults)
    num_layers = values.count("num_hidden_layers", high=_MAX_LAYERS)
    num_heads = values.count("num_attention_heads")
    num_kv_heads = values.count("num_key_value_heads", num_heads)
    head_dim = values.count("head_dim", values.count("hidden_size") // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise BadModel(
            f"{values.source}: {num_heads} heads of size {head_dim} over {num_kv_heads} key/value heads cannot be: the "
            "size must be even, and the first number a multiple of the last; repair the file"
        )
    num_window_layers, window = family.windows(values, num_layers)
    longest, default_length = family.lengths(values)
    return ConfigFacts(
        architecture=architecture,
        dtype=values.text("dtype", values.text("torch_dtype", "float32")).removeprefix("torch."),
        quantization=_quantization(values),
        num_layers=num_layers,
        num_window_layers=num_window_layers,
        window=window,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        default_length=default_length,
    )


def supported_architectures() -> tuple[str, ...]:
    """Every `model_type` that is read; the engine's list."""
    return tuple(_FAMILIES)


def _no_windows(values: ConfigValues, num_layers: int) -> tuple[int, int]:
    return 0, 0


def _uniform_windows(values: ConfigValues, num_layers: int) -> tuple[int, int]:
    return (num_layers, values.count("sliding_window")) if values.present("sliding_window") else (0, 0)


def _qwen_windows(values: ConfigValues, num_layers: int) -> tuple[int, int]:
    """Of the layers named in `layer_types`, else of those after the first `max_window_layers`; only where asked for."""
    if not values.flag("use_sliding_window", False) or not values.present("sliding_window"):
        return 0, 0
    first = values.count("max_window_layers", 28, low=0)
    return _named_windows(values, num_layers, max(0, num_layers - first))


def _gemma2_windows(values: ConfigValues, num_layers: int) -> tuple[int, int]:
    """The first of every two layers."""
    return _named_windows(values, num_layers, (num_layers + 1) // 2)


def _gemma3_windows(values: ConfigValues, num_layers: int) -> tuple[int, int]:
    """All but the last of every `sliding_window_pattern` layers."""
    return _named_windows(values, num_layers, num_layers - num_layers // values.count("sliding_window_pattern"))


def _named_windows(values: ConfigValues, num_layers: int, otherwise: int) -> tuple[int, int]:
    """Of the layers that `layer_types` calls sliding; where it is absent, of `otherwise` layers."""
    kinds = values.choices("layer_types", num_layers, _KINDS)
    count = otherwise if kinds is None else kinds.count(_SLIDING)
    return (count, values.count("sliding_window")) if count else (0, 0)


def _rope_lengths(values: ConfigValues) -> tuple[int, int]:
    """The longest sequence with the rotation stretched, and the longest that costs shorter ones no quality."""
    given = values.count("max_position_embeddings")
    scaling = values.section("rope_parameters" if values.present("rope_parameters") else "rope_scaling")
    match scaling.text("rope_type", scaling.text("type", "default")):
        case "default" | "llama3":
            return given, given
        case "linear" | "dynamic":
            stretched = int(given * scaling.number("factor"))
            return stretched, stretched
        case "yarn":
            original = scaling.count("original_max_position_embeddings", given)
            stretched = max(given, int(original * scaling.number("factor", given / original)))
            return stretched, stretched
        case "longrope" | "su":
            where = values if values.present("original_max_position_embeddings") else scaling
            return given, min(given, where.count("original_max_position_embeddings", given, low=2))
        case unknown:
            known = "default, linear, dynamic, llama3, yarn, longrope"
            raise BadModel(f"{scaling.source}: rope_type is {unknown[:80]}; pagefleet knows {known}")


def _given_lengths(values: ConfigValues) -> tuple[int, int]:
    """Gemma 3 states the length with its rotations already stretched."""
    given = values.count("max_position_embeddings")
    return given, given


def _quantization(values: ConfigValues) -> str:
    section = values.section("quantization_config")
    if not values.present("quantization_config"):
        return ""
    match section.text("quant_method", ""):
        case "fp8":
            return "fp8"
        case "compressed-tensors":
            kinds = {group.section("weights").text("type", "int") for group in section.sections("config_groups")}
            names = sorted(_QUANTIZED_TYPES.get(kind, kind) for kind in kinds)
            if len(names) == 1 and names[0] in _QUANTIZED_TYPES.values():
                return names[0]
            method = f"compressed-tensors of {', '.join(names)[:80] or 'no groups'}"
        case other:
            method = other[:80] or "not given"
    raise BadModel(
        f"{section.source}: quant_method is {method}; pagefleet runs fp8, and fp8 or int8 of compressed-tensors: "
        "choose one of these checkpoints, or one without quantization"
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """Where an architecture differs. `defaults` are those of its configuration class in transformers."""

    windows: _Windows = _no_windows
    lengths: Callable[[ConfigValues], tuple[int, int]] = _rope_lengths
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA2 = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
_GEMMA3 = {**_GEMMA2, "max_position_embeddings": 131_072, "sliding_window_pattern": 6}
_PHI3 = {
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_OLMO2 = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096}
_FAMILIES: Mapping[str, _Family] = {
    "gemma2": _Family(_gemma2_windows, defaults=_GEMMA2),
    "gemma3": _Family(_gemma3_windows, _given_lengths, _GEMMA3),
    "gemma3_text": _Family(_gemma3_windows, _given_lengths, _GEMMA3),
    "llama": _Family(),
    "mistral": _Family(_uniform_windows, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "olmo2": _Family(defaults=_OLMO2),
    "phi3": _Family(_uniform_windows, defaults=_PHI3),
    "qwen2": _Family(_qwen_windows, defaults=_QWEN2),
    "qwen3": _Family(_qwen_windows, defaults={**_QWEN2, "head_dim": 128}),
}
