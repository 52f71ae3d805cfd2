"""A model's config.json, from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.file import GgufModel
from pagefleet_engine.gguf.names import our_tensors

_KINDS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""`general.architecture` and our `model_type`."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Those scale queries by the width of the model over its heads, and the file does not say so."""
_TYPES = {"F32": "float32", "F16": "float16"}


class _Fields:
    """The metadata of the model's architecture, checked."""

    def __init__(self, model: GgufModel) -> None:
        self.source = model.files[0]
        self._values = model.metadata
        self.architecture = self._values.get("general.architecture")

    def _found(self, name: str) -> Any:
        return self._values.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self._found(name)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # one for each layer
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.refusal(name, "is missing" if value is None else f"is {str(value)[:40]}")
        return value

    def has(self, name: str) -> bool:
        return self._found(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._found(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise self.refusal(name, "is missing or no number")
        return float(value)

    def text(self, name: str) -> str:
        return str(self._found(name) or "")

    def refusal(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {self.architecture}.{name} {what[:80]}: convert the model anew")


def model_kind(model: GgufModel) -> str:
    """Our `model_type`.

    Raises:
        ModelLoadError: models of its kind are not run from GGUF.
    """
    said = model.metadata.get("general.architecture")
    kind = _KINDS.get(said) if isinstance(said, str) else None
    if kind is None:
        raise ModelLoadError(
            f"{model.files[0]}: models of the architecture {str(said)[:40]!a} are not run from GGUF, only "
            f"{', '.join(_KINDS)}: give its safetensors"
        )
    return "mixtral" if kind == "llama" and model.metadata.get("llama.expert_count") else kind


def head_dim(model: GgufModel) -> int:
    """Of queries and keys.

    Raises:
        ModelLoadError: the file does not say.
    """
    fields = _Fields(model)
    heads, width = fields.count("attention.head_count"), fields.count("embedding_length")
    return fields.count("attention.key_length", max(1, width // heads))


def hf_config(model: GgufModel, factors: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    """The configuration as Hugging Face spells it.

    `factors`: of the tensor `rope_freqs`, by which frequencies are divided.

    Raises:
        ModelLoadError: something is missing, or the model is of a kind that is not run.
    """
    fields, kind, embedding = _Fields(model), model_kind(model), model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{fields.source} has no token_embd.weight, as every model has: download it again")
    first = model.tensors.get("blk.0.attn_q.weight")
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": fields.count("attention.head_count_kv", fields.count("attention.head_count")),
        "head_dim": head_dim(model),
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in model.tensors,
        "torch_dtype": "bfloat16" if first is None else _TYPES.get(first.type.name, "bfloat16"),
    }
    rotated = fields.count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise fields.refusal("rope.dimension_count", f"is {rotated} of {config['head_dim']}, which is not run")
    scaling = _rope_scaling(fields, config["max_position_embeddings"], factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    types = _quantized(kind, model)
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config | _of_kind(kind, fields, config)


def _of_kind(kind: str, fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    match kind:
        case "mixtral":
            return {"num_local_experts": fields.count("expert_count"), "sliding_window": None} | _chosen(fields)
        case "qwen3_moe":
            return {
                "num_experts": fields.count("expert_count"),
                "moe_intermediate_size": fields.count("expert_feed_forward_length"),
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            } | _chosen(fields)
        case "gemma2" | "gemma3_text":
            scalar = config["head_dim"]
            if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[kind]:
                scalar = config["hidden_size"] // config["num_attention_heads"]
            found: dict[str, Any] = {
                "query_pre_attn_scalar": scalar,
                "sliding_window": fields.count("attention.sliding_window", 4096 if kind == "gemma2" else 1024),
            }
            if kind == "gemma2":
                found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
                found["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
            else:
                found["rope_theta"] = fields.number("rope.freq_base", 1_000_000.0)
                found["rope_local_base_freq"] = 10_000.0
            return found
        case _:
            return {}


def _quantized(kind: str, model: GgufModel) -> dict[str, list[str]]:
    """The linear layers that lie in blocks, by type."""
    found: dict[str, list[str]] = {}
    for name, tensor in model.tensors.items():
        if tensor.type.plain is None and len(tensor.shape) == 2 and name != "token_embd.weight":
            for ours in our_tensors(kind, name, tensor.shape) or ():
                found.setdefault(tensor.type.name, []).append(ours.name.rpartition(".")[0])
    return found


def _chosen(fields: _Fields) -> dict[str, Any]:
    return {"num_experts_per_tok": fields.count("expert_used_count")}


def _rope_scaling(fields: _Fields, length: int, factors: np.ndarray[Any, Any] | None) -> dict[str, Any] | None:
    if factors is not None:  # Llama 3's, one for each frequency: what LongRoPE is at any length
        each = [float(factor) for factor in factors]
        return {
            "rope_type": "longrope",
            "short_factor": each,
            "long_factor": each,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    match fields.text("rope.scaling.type"):
        case "" | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": fields.number("rope.scaling.factor"),
                "original_max_position_embeddings": fields.count("rope.scaling.original_context_length", length),
            }
        case other:
            raise fields.refusal("rope.scaling.type", f"is {other}, and none, linear and yarn are run")
