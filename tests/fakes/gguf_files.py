"""GGUF files of small checkpoints, as llama.cpp's converter writes them, by the format's own package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from tests.fakes.gguf_blocks import random_blocks
from tests.fakes.gguf_tensors import ARCHITECTURES, tensors_of

Type = GGMLQuantizationType
_STAY = re.compile(r"ffn_gate_inp|norm|bias$|altup_(router|.*_coef)")
_OLD = ("gpt2", "falcon", "bloom", "mpt")
_SPELLINGS = {
    **dict.fromkeys(("n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_positions", "max_seq_len"), "max_position_embeddings"),
    "layer_norm_epsilon": "layer_norm_eps",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "moe_num_shared_experts": "n_shared_experts",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_WITH_WINDOWS = ("gemma2", "gemma3_text", "gemma3n_text", "cohere2", "phi3", "gpt_oss", "olmo3", "exaone4")


def write_gguf(
    folder: Path,
    path: Path,
    *,
    matrices: Type = Type.F32,
    types: Mapping[str, Type] | None = None,
    shape: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    older: bool = False,
    expanded: bool = False,
) -> None:
    """Write the model in `folder`.

    Args:
        folder: holds config.json and weights.
        path: of the file.
        matrices: their type, that of the embedding too.
        types: of some, by a part of their names.
        shape: metadata of the architecture, in place of what config.json says, or more.
        others: more metadata.
        expanded: what the matrices' types make of the numbers, in F32.
        older: as files were once: maps from latents to keys and values in one tensor, and Phi 2's three projections.
    """
    config = _spelled(json.loads((folder / "config.json").read_text()))
    kind = config["model_type"]
    writer = GGUFWriter(path, ARCHITECTURES[kind])
    rope = config.get("rope_parameters") or {}
    said = _metadata(config) | dict(shape or {})
    for name, value in said.items():
        if value is not None:
            add_value(writer, f"{ARCHITECTURES[kind]}.{name}", value)
    for name, value in (others or {}).items():
        add_value(writer, name, value)
    factors = {f"rope_factors_{length}.weight": rope.get(f"{length}_factor") for length in ("short", "long")}
    if rope.get("rope_type") == "llama3":
        factors["rope_freqs.weight"] = _llama3_factors(rope, config["head_dim"])
    for name, values in factors.items():
        if values:
            writer.add_tensor(name, np.array(values, np.float32), raw_dtype=Type.F32)
    for name, numbers in tensors_of(config, _weights(folder), older=older).items():
        own = [kind for part, kind in (types or {}).items() if part in name]
        wanted = (own or [matrices])[0] if numbers.ndim > 1 and not _STAY.search(name) else Type.F32
        blocks = _in_type(numbers, wanted)
        if expanded:
            writer.add_tensor(name, dequantize(blocks, wanted), raw_dtype=Type.F32)
        else:
            writer.add_tensor(name, blocks, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_type(numbers: np.ndarray, wanted: Type) -> np.ndarray:
    """Others of the same size in a type that the package does not round to."""
    try:
        return quantize(numbers, wanted)
    except NotImplementedError:
        shape = (*numbers.shape[:-1], -1)
        seed, rows = int(wanted), numbers.size // numbers.shape[-1]
        return random_blocks(wanted, rows, numbers.shape[-1], seed, numbers.std()).reshape(shape)


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """What frequencies are divided by: by how often each turns in the first context."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0.0, 1.0)
    return list(1.0 / (kept + (1.0 - kept) / rope["factor"]))


def _spelled(config: dict[str, Any]) -> dict[str, Any]:
    """With Llama's names of fields, and all that older kinds take for granted."""
    kind, found = (
        config["model_type"],
        config | {own: config[name] for name, own in _SPELLINGS.items() if name in config},
    )
    if kind not in _OLD:
        return found
    heads, is_falcon = found["num_attention_heads"], kind == "falcon"
    found["num_key_value_heads"] = config["num_kv_heads"] if is_falcon else heads
    if is_falcon and config["multi_query"] and not config["new_decoder_architecture"]:
        found["num_key_value_heads"] = 1
    width = config.get("ffn_hidden_size") or config.get("n_inner") or 4 * found["hidden_size"]
    return {"max_position_embeddings": 512} | found | {"intermediate_size": width}


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture; None where a model has none of it."""
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return (
        {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config.get("intermediate_size_mlp", config["intermediate_size"]),
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
            "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
            "rope.dimension_count": int(rope["partial_rotary_factor"] * head_dim)
            if "partial_rotary_factor" in rope
            else None,
            "rope.freq_base": float((rope.get("full_attention") or rope).get("rope_theta", 10_000.0)),
            "expert_count": config.get("num_local_experts")
            or config.get("num_experts")
            or config.get("n_routed_experts"),
            "expert_used_count": config.get("num_experts_per_tok"),
            "expert_feed_forward_length": config["intermediate_size"]
            if kind in ("llama4_text", "minimax_m2", "hunyuan_v1_moe")
            else config.get("moe_intermediate_size"),
            "interleave_moe_layer_step": config.get("interleave_moe_layer_step"),
            "attention.key_length": config.get("head_dim"),
            "attention.value_length": config.get("head_dim"),
            "attention.sliding_window": config.get("sliding_window") if kind in _WITH_WINDOWS else None,
            "attention.sliding_window_pattern": [layer == "sliding_attention" for layer in config["layer_types"]]
            if kind in ("olmo3", "exaone4")
            else None,
            "attn_logit_softcapping": config.get("attn_logit_softcapping"),
            "final_logit_softcapping": config.get("final_logit_softcapping"),
            "logit_scale": config.get("logit_scale") or config.get("logits_scaling"),
            "attention.scale": config.get("attention_multiplier"),
            "embedding_scale": config.get("embedding_multiplier"),
            "residual_scale": config.get("residual_multiplier"),
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
            "expert_shared_count": config.get("n_shared_experts"),
            "expert_weights_scale": config.get("routed_scaling_factor"),
            "expert_weights_norm": config.get("norm_topk_prob") if kind in ("glm4_moe", "dots1") else None,
            "leading_dense_block_count": config.get("first_k_dense_replace"),
        }
        | _latent_metadata(config)
        | _altup_metadata(config)
    )


def _altup_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    if "altup_num_inputs" not in config:
        return {}
    kept = NormalDist()
    return {
        "altup.num_inputs": config["altup_num_inputs"],
        "altup.active_idx": config["altup_active_idx"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "activation_sparsity_scale": [
            kept.inv_cdf(share) if share else -math.inf for share in config["activation_sparsity_pattern"]
        ],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
    }


def _latent_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of attention over latents, which llama.cpp computes as one of a single key head that is as wide as they."""
    if "kv_lora_rank" not in config:
        return {}
    rank, rotated, rope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["rope_parameters"]
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_weights_norm": config.get("norm_topk_prob"),
    } | _yarn_metadata(rope)


def _yarn_metadata(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in load_file(folder / "model.safetensors").items()}


def add_value(writer: GGUFWriter, name: str, value: Any) -> None:
    """Add metadata of the type that llama.cpp's converter gives such values."""
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)
