"""From a model folder's config.json to a `ModelArch`; each family reads what is its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError, read_json_file
from pagefleet_protocol.model_config.overrides import read_config
from pagefleet_protocol.model_config.shape import ModelShape, read_shape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import Activation
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import model_family
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_engine.models.rope_config import read_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def read_arch(folder: Path, overrides: str | None = None) -> ModelArch:
    """Read `config.json`, and the end-of-text tokens of `generation_config.json` where there is one.

    `overrides`: `ModelConfig.hf_overrides`.

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
    try:
        config = read_config(path, overrides)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
    config = _with_modelopt(folder, config)
    arch = arch_from_config(config, f"{path} with hf_overrides" if overrides else str(path))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return arch
    try:
        more = ConfigFields(read_json(generation), str(generation)).token_ids("eos_token_id")
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
    return replace(arch, eos_token_ids=tuple(dict.fromkeys((*arch.eos_token_ids, *more))))


def _with_modelopt(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The same with what ModelOpt's own file says, where config.json says nothing of quantization."""
    path = folder / "hf_quant_config.json"
    if config.get("quantization_config") is not None or not path.is_file():
        return config
    return {**config, "quantization_config": {**read_json(path), "quant_method": "modelopt"}}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelLoadError when it is not one."""
    try:
        return read_json_file(path)
    except (ModelConfigError, FileNotFoundError) as error:
        raise ModelLoadError(str(error)) from None


def arch_from_config(config: Mapping[str, Any], source: str) -> ModelArch:
    """The architecture that a configuration describes; `source` names it in errors.

    Raises:
        ModelLoadError: a value cannot be, or the model is of a kind we do not run.
    """
    try:
        shape = read_shape(config, source)
        return model_family(shape.model_type).read(shape)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None


def read_shared(
    shape: ModelShape,
    *,
    activation_field: str = "hidden_act",
    eps_field: str = "rms_norm_eps",
    intermediate_size: int | None = None,
    ropes: tuple[RopeParameters, ...] | None = None,
) -> ModelArch:
    """A Llama of this shape: no soft caps, one rotation.

    A family that rotates in several ways gives its `ropes`, for `max_position_embeddings` as the file has it.
    `intermediate_size`: where a file has no field of that name.
    """
    fields = shape.fields
    return ModelArch(
        model_type=shape.model_type,
        vocab_size=fields.count("vocab_size"),
        hidden_size=shape.hidden_size,
        intermediate_size=intermediate_size or fields.count("intermediate_size"),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=fields.number(eps_field, 1e-6),
        activation=_activation(fields, activation_field),
        query_scale=shape.head_dim**-0.5,
        ropes=ropes or (read_rope(fields, shape.head_dim),),
        layer_ropes=(0,) * shape.num_layers,
        windows=shape.windows,
        chunked=shape.chunked,
        num_kv_shared_layers=shape.num_kv_shared_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        context_length=shape.context_length,
        default_length=shape.default_length,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=shape.dtype,
        gguf_layout=fields.flag("gguf_layout", False),
        quantization=read_quantization(fields),
    )


def _activation(fields: ConfigFields, name: str) -> Activation:
    said = fields.text(name, "silu")
    if said not in _ACTIVATIONS:
        raise ModelLoadError(f"{fields.source}: {name} is {said}; pagefleet runs {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]
