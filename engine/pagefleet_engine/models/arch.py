"""A model's shape, read once from a Hugging Face config.json. Every default and every old spelling is settled here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.scheme import Quantization
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_engine.models.registry import MODEL_MODULES
from pagefleet_engine.models.rope_config import read_rope

# Far over any model there is: a damaged number must not build layers until memory is full.
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """What the files in `models/` build from."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    windows: tuple[int | None, ...]
    """Per layer: how many tokens each token sees, itself included; None for all."""
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    """As the configuration says it."""
    context_length: int
    """Most positions the model was made for, rope scaling included."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; empty when the configuration names none."""
    dtype: str
    """Type of the checkpoint as the configuration names it, e.g. `bfloat16`; float32 when it does not."""
    quantization: Quantization | None = None
    """Which of the checkpoint's matrices are stored in eight bits."""


def read_arch(folder: Path) -> ModelArch:
    """Read `config.json`, and the end-of-text tokens of `generation_config.json` where there is one.

    Raises:
        ModelLoadError: a file is missing or unreadable, a value cannot be, or the model is of a kind we do not run.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder: give a model folder in Hugging Face layout")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelLoadError(f"{folder} may not be read by this user: change its permissions")
    path = folder / "config.json"
    if not path.is_file():
        found = "the folder is empty" if not any(folder.iterdir()) else "that file is missing"
        raise ModelLoadError(f"{path}: {found}; give a model folder in Hugging Face layout")
    arch = arch_from_config(read_json(path), str(path))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return arch
    more = ConfigFields(read_json(generation), str(generation)).token_ids("eos_token_id")
    return replace(arch, eos_token_ids=tuple(dict.fromkeys((*arch.eos_token_ids, *more))))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelLoadError when it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}): download the file again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object: download the file again")
    return value


def arch_from_config(config: Mapping[str, Any], source: str) -> ModelArch:
    """The architecture that a configuration describes; `source` names it in errors."""
    fields = ConfigFields(config, source)
    model_type = fields.text("model_type", "")
    if model_type not in MODEL_MODULES:
        supported = ", ".join(MODEL_MODULES)
        raise ModelLoadError(f"{source}: model_type is {model_type or 'not given'}; pagefleet runs {supported}")
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    # Qwen3 alone has a fixed default, of Hugging Face's configuration class
    head_dim = fields.count("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelLoadError(
            f"{source}: {num_heads} heads of size {head_dim} over {num_kv_heads} key/value heads cannot be: the size "
            "must be even, and the first number a multiple of the last; repair the file"
        )
    num_layers = fields.count("num_hidden_layers", high=_MAX_LAYERS)
    max_position = fields.count("max_position_embeddings")
    rope, context_length = read_rope(fields, max_position)
    return ModelArch(
        model_type=model_type,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(fields, model_type, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        max_position_embeddings=max_position,
        context_length=context_length,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        quantization=read_quantization(fields),
    )


def _refuse_unsupported(fields: ConfigFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"{fields.source}: hidden_act is {activation}; pagefleet runs silu")


def _windows(fields: ConfigFields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen only when told to, in the layers named or in those after the first few."""
    match model_type:
        case "mistral":
            slides = fields.present("sliding_window")
            return (fields.count("sliding_window") if slides else None,) * num_layers
        case "qwen2" | "qwen3" if fields.flag("use_sliding_window", False):
            window = fields.count("sliding_window", 4096)
            kinds = fields.layer_types(num_layers)
            if kinds is None:
                first = fields.count("max_window_layers", 28, low=0)
                kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        case _:
            return (None,) * num_layers
