"""What GGUF calls the tensors of a model, and what its checkpoint in safetensors would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

HEAD = "lm_head"
"""Our name."""
_MLP = ("gate", "up", "down")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_MINIMAX_M2 = {**_MIXTRAL_EXPERTS, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ERNIE_EXPERTS = {**_QWEN_EXPERTS, **_SHARED_EXPERTS, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_NORM_BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
_GLM4_MOE = {**_QWEN_EXPERTS, **_SHARED_EXPERTS, **_NORM_BEFORE_MLP}
_DEEPSEEK = {
    **_QWEN_EXPERTS,
    **_SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_GPT_OSS = {
    **_NORM_BEFORE_MLP,
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
_LLAMA4 = {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in _MLP},
    **{f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in _MLP},
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in _MLP},
}
_GEMMA3N = {
    **_NORMS_AROUND,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_MERGED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_HUNYUAN_EXPERTS = {
    **_HUNYUAN,
    **_QWEN_EXPERTS,
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in _MLP},
}
_PHI = {
    "output_norm": "model.final_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FALCON = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_norm_2": "ln_attn",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
"""And BLOOM's."""
_MPT = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_STABLELM = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
_LAYERS = {**dict.fromkeys(("gpt2", "falcon", "bloom"), "transformer.h"), "mpt": "transformer.blocks"}
"""What kinds call their layers, but for most."""
_OF_KINDS: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "mixtral": _MIXTRAL_EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _QWEN_EXPERTS,
    "gemma": {},
    "gemma2": _NORMS_AROUND,
    "gemma3_text": _NORMS_AROUND,
    "granite": {},
    "granitemoe": _GRANITE_EXPERTS,
    "cohere": {},
    "cohere2": {},
    "olmo2": _NORMS_AFTER,
    "olmoe": _QWEN_EXPERTS,
    "phi3": _MERGED,
    "phi": _PHI,
    "phimoe": _MIXTRAL_EXPERTS,
    "gpt2": _GPT2,
    "falcon": _FALCON,
    "bloom": _FALCON,
    "mpt": _MPT,
    "stablelm": _STABLELM,
    "smollm3": {},
    "seed_oss": _NORM_BEFORE_MLP,
    "minimax_m2": _MINIMAX_M2,
    "glm4": _GLM4,
    "olmo3": _NORMS_AFTER,
    "exaone4": _NORMS_AFTER,
    "ernie4_5": {},
    "ernie4_5_moe": _ERNIE_EXPERTS,
    "dots1": {**_QWEN_EXPERTS, **_SHARED_EXPERTS},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN_EXPERTS,
    "qwen2_moe": {**_QWEN_EXPERTS, **_SHARED_EXPERT},
    "glm4_moe": _GLM4_MOE,
    "llama4_text": _LLAMA4,
    "gemma3n_text": _GEMMA3N,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {**_QWEN_EXPERTS, **_GPT_OSS},
}
_UNIT_MORE = ("gemma", "gemma2", "gemma3_text")
_IN_TURNS = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
_WITHOUT_SUFFIX = ("exp_probs_b", "attn_sinks", "altup_correct_scale")
"""Parts whose name here does not say whether they are weights or biases."""
_DRAFTING = re.compile(r"blk\.\d+\.nextn\.")
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([a-z0-9_]+)\.(weight|bias)")
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class OurTensor(NamedTuple):
    """One of ours that a tensor of the file holds."""

    name: str
    expert: int | None = None
    """Which of the matrices that the file has in one tensor."""
    in_turns: bool = False
    """Rows of a head take turns: one of its first half, one of its second."""
    unit_more: bool = False
    """The file's numbers are one more than a checkpoint's."""
    is_row: bool = False
    """A matrix of one row, which the file may have as a vector."""


def our_tensors(model_type: str, name: str, num_stacked: int, *, tied: bool) -> list[OurTensor] | None:
    """What the tensor `name` of a model of the kind is here, nothing where it is no weight; None: its name is unknown.

    A stack is `num_stacked` matrices; the embedding is the head too where they are `tied`.
    llama.cpp rotates neighbours of Llama's, Granite's and SmolLM3's heads, and so its files have them side by side; and
    norms of Gemma up to 3 with the one in them that a checkpoint leaves out.
    """
    if name in _NOT_WEIGHTS or _DRAFTING.match(name):
        return []
    found = _TENSOR.fullmatch(name)
    if found is None:
        return None
    layer, part, kind = found.groups()
    ours = {**(_OUTER if layer is None else _LAYER), **_OF_KINDS[model_type]}.get(part)
    if ours is None:
        return None
    full = ours if layer is None else f"{_LAYERS.get(model_type, 'model.layers')}.{layer}.{ours}"
    if part not in _WITHOUT_SUFFIX:
        full = f"{full}.{kind}"
    if "{}" in full and kind == "bias":  # of all experts in one
        return [OurTensor(f"{full.replace('.{}', '').removesuffix('.bias')}_bias")]
    if "{}" in full:
        return [OurTensor(full.format(expert), expert) for expert in range(num_stacked)]
    in_turns = model_type in _IN_TURNS and part in ("attn_q", "attn_k")
    less_one = model_type in _UNIT_MORE and "norm" in part
    is_row = part == "ffn_gate_inp_shexp" or full.endswith("moe_statics.e_score_correction_bias")
    own = OurTensor(full, None, in_turns, less_one, is_row)
    return [own, OurTensor(f"{HEAD}.{kind}")] if tied and part == "token_embd" else [own]
