"""GGUF files of small checkpoints, as llama.cpp's converter writes them, by the format's own package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

Type = GGMLQuantizationType
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "llama4_text": "llama4",
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    **{
        f"{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert")
        for part in ("gate", "up", "down")
    },
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_NORMS = {"gemma2": _AROUND, "gemma3_text": _AROUND, "olmo2": _AFTER, "glm4_moe": _AFTER, "gpt_oss": _AFTER}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ROTATED = ("llama", "granite", "granitemoe")
_STAY = re.compile(r"ffn_gate_inp|norm|bias$")
_WITH_WINDOWS = ("gemma2", "gemma3_text", "cohere2", "phi3", "gpt_oss")


def write_gguf(
    folder: Path,
    path: Path,
    *,
    matrices: Type = Type.F32,
    types: Mapping[str, Type] | None = None,
    shape: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    whole_maps: bool = False,
) -> None:
    """Write the model in `folder`.

    Args:
        folder: holds config.json and weights.
        path: of the file.
        matrices: their type, that of the embedding too.
        types: of some, by a part of their names.
        shape: metadata of the architecture, in place of what config.json says, or more.
        others: more metadata.
        whole_maps: from latents, for keys and values in one tensor, as older files have them.
    """
    config = json.loads((folder / "config.json").read_text())
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
    for name, numbers in _tensors(config, _weights(folder), whole_maps=whole_maps).items():
        own = [kind for part, kind in (types or {}).items() if part in name]
        wanted = (own or [matrices])[0] if numbers.ndim > 1 and not _STAY.search(name) else Type.F32
        writer.add_tensor(name, quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """What frequencies are divided by: by how often each turns in the first context."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0.0, 1.0)
    return list(1.0 / (kept + (1.0 - kept) / rope["factor"]))


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture; None where a model has none of it."""
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    is_llama4 = kind == "llama4_text"
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size_mlp" if is_llama4 else "intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "rope.freq_base": float((rope.get("full_attention") or rope).get("rope_theta", 10_000.0)),
        "expert_count": config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config["intermediate_size"] if is_llama4 else config.get("moe_intermediate_size"),
        "interleave_moe_layer_step": config.get("interleave_moe_layer_step"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.sliding_window": config.get("sliding_window") if kind in _WITH_WINDOWS else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "logit_scale": config.get("logit_scale") or config.get("logits_scaling"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob") if kind == "glm4_moe" else None,
        "leading_dense_block_count": config.get("first_k_dense_replace"),
    } | _latent_metadata(config)


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
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_weights_norm": config.get("norm_topk_prob"),
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


def _tensors(config: Mapping[str, Any], stored: Mapping[str, np.ndarray], *, whole_maps: bool) -> dict[str, np.ndarray]:
    kind, found = config["model_type"], {}
    experts: dict[str, list[np.ndarray]] = {}
    names = {**_NAMES, **_NORMS.get(kind, {})}
    for name, value in stored.items():
        numbers = value
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + np.float32(1)
        outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name in outer or name == "lm_head.weight":
            found[outer.get(name, "output.weight")] = numbers
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "self_attn.kv_b_proj.weight" and not whole_maps:
            by_head = numbers.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            keys, values = np.split(by_head, [config["qk_nope_head_dim"]], 1)
            found[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(values)
            continue
        if stacked := _of_stack(rest, numbers):
            found |= {f"blk.{layer}.{own}": part for own, part in stacked.items()}
            continue
        part, _, last = rest.rpartition(".")
        if ".experts." in part:
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERTS[part.rpartition('.')[2]]}_exps.{last}", []).append(numbers)
            continue
        if ARCHITECTURES[kind] in ("llama", "granite", "granitemoe") and part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
        ):
            heads = config["num_attention_heads"]
            numbers = _in_turns(numbers, config.get("head_dim") or config["hidden_size"] // heads)
        if rest in names:  # it does not say whether it is a weight
            part, last = rest, "bias"
        found[f"blk.{layer}.{names[part]}.{last}"] = numbers
    return found | {name: np.stack(each) for name, each in experts.items()}


def _of_stack(name: str, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Of a tensor that has the matrices of all experts, or their biases; and of gpt-oss's sinks. Nothing of others."""
    found: dict[str, np.ndarray] = {}
    match name.removeprefix("mlp.experts.").removeprefix("block_sparse_moe."):
        case "feed_forward.experts.gate_up_proj":
            gate, up = np.split(numbers.swapaxes(1, 2), 2, 1)
            found = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        case "feed_forward.experts.down_proj":
            found = {"ffn_down_exps.weight": numbers.swapaxes(1, 2)}
        case "self_attn.sinks":
            found = {"attn_sinks.weight": numbers}
        case "gate_up_proj":
            by_rows = numbers.swapaxes(1, 2)
            found = {"ffn_gate_exps.weight": by_rows[:, ::2], "ffn_up_exps.weight": by_rows[:, 1::2]}
        case "gate_up_proj_bias":
            found = {"ffn_gate_exps.bias": numbers[:, ::2], "ffn_up_exps.bias": numbers[:, 1::2]}
        case "down_proj":
            found = {"ffn_down_exps.weight": numbers.swapaxes(1, 2)}
        case "down_proj_bias":
            found = {"ffn_down_exps.bias": numbers}
        case "input_linear.weight":
            gate, up = np.split(numbers, 2, 1)
            found = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        case "output_linear.weight":
            found = {"ffn_down_exps.weight": numbers}
    return {own: np.ascontiguousarray(part) for own, part in found.items()}


def _in_turns(numbers: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a head's halves side by side."""
    halves = numbers.reshape(-1, 2, head_dim // 2, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
