"""What llama.cpp's converter makes of a checkpoint's tensors: other names, and some in another order or in parts."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

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
    "gemma3n_text": "gemma3n",
    "phi": "phi2",
    "phimoe": "phimoe",
    "gpt2": "gpt2",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "stablelm": "stablelm",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "minimax_m2": "minimax-m2",
    "glm4_moe_lite": "deepseek2",
    "glm4": "glm4",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "dots1": "dots1",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "feed_forward.shared_expert")
        for part in ("gate", "up", "down")
    },
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "self_attn.dense": "attn_output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_WITHOUT_SUFFIX = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.norm_f": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.altup_projections": "altup_proj",
    "model.altup_unembed_projections": "altup_unembd_proj",
}
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_NORMS = {
    "gemma2": _AROUND,
    "gemma3_text": _AROUND,
    "gemma3n_text": _AROUND,
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "glm4_moe", "gpt_oss", "seed_oss"), _AFTER),
}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ROTATED = ("llama", "granite", "granitemoe", "smollm3")
_LESS_ONE = ("gemma", "gemma2", "gemma3_text")
_LAYER = re.compile(r"(?:model\.layers|transformer\.(?:h|blocks))\.(\d+)\.(.+)")


def tensors_of(config: Mapping[str, Any], stored: Mapping[str, np.ndarray], *, older: bool) -> dict[str, np.ndarray]:
    """The file's tensors, by name; `older`: see write_gguf."""
    found: dict[str, np.ndarray] = {}
    stacks: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for name, numbers in stored.items():
        for own, part in _placed(config, name, numbers, older=older):
            is_one_of_many = part.ndim == 2 and ("_exps.weight" in own or own.startswith("altup_"))
            is_one_of_many |= (
                config["model_type"] == "stablelm" and "_norm.weight" in own and ("_q_" in own or "_k_" in own)
            )
            if is_one_of_many:
                stacks[own].append(part)
            else:
                found[own] = np.ascontiguousarray(part)
    if older and config["model_type"] == "phi":
        for number, kind in itertools.product(range(config["num_hidden_layers"]), ("weight", "bias")):
            parts = [found.pop(f"blk.{number}.attn_{part}.{kind}") for part in "qkv"]
            found[f"blk.{number}.attn_qkv.{kind}"] = np.concatenate(parts)
    layers, reading = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    for number in range(layers - reading, layers):  # they have what nobody reads, as published
        for kind in ("attn_k", "attn_v", "attn_k_norm"):
            found[f"blk.{number}.{kind}.weight"] = found[f"blk.0.{kind}.weight"] + np.float32(1)
    return found | {name: np.stack(each) for name, each in stacks.items()}


def _placed(
    config: Mapping[str, Any], name: str, numbers: np.ndarray, *, older: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Names there, and the numbers of each."""
    kind = config["model_type"]
    if kind in _LESS_ONE and name.endswith("norm.weight"):
        numbers = numbers + np.float32(1)
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        outer, _, last = name.rpartition(".")
        yield f"{_OUTER.get(outer) or _OUTER[outer.rpartition('.')[0]]}.{last}", numbers
        return
    layer, rest = in_layer.groups()
    parts = _of_stack(rest, numbers)
    if rest == "self_attn.kv_b_proj.weight" and not older:
        by_head = numbers.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = np.split(by_head, [config["qk_nope_head_dim"]], 1)
        parts = {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
    if not parts:
        parts = {_name_of(kind, rest): numbers}
        if kind == "gpt2" and numbers.ndim == 2:
            parts = {own: one.T for own, one in parts.items()}
        if "query_key_value" in rest:
            parts = {own: _by_kind(one, config) for own, one in parts.items()}
        if kind in ("mistral", "mixtral", *_ROTATED) and rest.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            parts = {own: _in_turns(one, head_dim) for own, one in parts.items()}
    yield from ((f"blk.{layer}.{own}", part) for own, part in parts.items())


def _name_of(kind: str, rest: str) -> str:
    """Of what a layer has as it is."""
    names = {**_NAMES, **_NORMS.get(kind, {})}
    part, _, last = rest.rpartition(".")
    if ".experts." in part:
        return f"ffn_{_EXPERTS[part.rpartition('.')[2]]}_exps.{last}"
    if rest in _WITHOUT_SUFFIX:
        return _WITHOUT_SUFFIX[rest]
    if ".norms." in part:  # one for each head
        return f"attn_{'q' if '.q_' in part else 'k'}_norm.{last}"
    return f"{names[part]}.{last}"


def _of_stack(name: str, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Of a tensor that has the matrices of all experts, or their biases. Nothing of others."""
    found: dict[str, np.ndarray] = {}
    match name.removeprefix("mlp.experts.").removeprefix("block_sparse_moe."):
        case "feed_forward.experts.gate_up_proj":
            found = _gate_and_up(numbers.swapaxes(1, 2))
        case "gate_up_proj":
            by_rows = numbers.swapaxes(1, 2)
            found = {"ffn_gate_exps.weight": by_rows[:, ::2], "ffn_up_exps.weight": by_rows[:, 1::2]}
        case "gate_up_proj_bias":
            found = {"ffn_gate_exps.bias": numbers[:, ::2], "ffn_up_exps.bias": numbers[:, 1::2]}
        case "down_proj" | "feed_forward.experts.down_proj":
            found = {"ffn_down_exps.weight": numbers.swapaxes(1, 2)}
        case "down_proj_bias":
            found = {"ffn_down_exps.bias": numbers}
        case "input_linear.weight":
            found = _gate_and_up(numbers)
        case "output_linear.weight":
            found = {"ffn_down_exps.weight": numbers}
    return found


def _gate_and_up(numbers: np.ndarray) -> dict[str, np.ndarray]:
    gate, up = np.split(numbers, 2, 1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


def _by_kind(numbers: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of queries, then of keys, then of values, where each key head followed the query heads that read it."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    groups = numbers.reshape(config["num_key_value_heads"], -1, head_dim, *numbers.shape[1:])
    return np.concatenate([part.reshape(-1, *numbers.shape[1:]) for part in np.split(groups, [-2, -1], 1)])


def _in_turns(numbers: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a head's halves side by side."""
    halves = numbers.reshape(-1, 2, head_dim // 2, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)
