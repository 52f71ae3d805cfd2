"""What the metadata of each kind of model in GGUF become in config.json.

Source: llama.cpp's converter, and what it takes for granted where it reads a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from pagefleet_protocol.model_config.gguf_fields import GgufFields, GgufModel

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Those scale queries by the width of the model over its heads, and the file does not say so."""
_COHERE2_PERIOD = 4
"""Layers of which the last sees everything."""
_DEEPSEEK_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Of V2 and V3 by their number of experts: groups, and how many of them a token chooses; older files do not say so."""
_LLAMA4_WITHOUT_NORMS = 128
"""Experts of Maverick, which does not normalise queries and keys as Scout does."""
_PHIMOE_MAGNITUDE = 1.243163121016122
"""Of Phi 3.5 MoE's rotation at any length; files have what LongRoPE's formula gives instead."""
_SMOLLM3_PERIOD = 4
"""Layers of which the last does not rotate."""
_EXAONE4_LAYERS = 64
"""Of its 32B."""
_SOFTMAX, _SIGMOID = 1, 2
_YARN_LOG = 0.1
"""What llama.cpp's multiplier of the logarithm has in it, and YaRN's formula has beside it."""
_LAYER_NORM_EPS = {
    **dict.fromkeys(("cohere", "cohere2", "phi", "stablelm"), "layer_norm_eps"),
    **dict.fromkeys(("gpt2", "falcon", "bloom", "mpt"), "layer_norm_epsilon"),
}
"""What kinds with LayerNorm call its epsilon."""
_RMS, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def of_kind(model_type: str, model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that not all kinds have; `config`: those that they have.

    Raises:
        ModelConfigError: something is missing, or is not run.
    """
    read = _READERS.get(model_type)
    found = {} if read is None else read(model, fields, config)
    eps = _LAYER_NORM_EPS.get(model_type)
    return {eps or "rms_norm_eps": fields.number(_LAYER_NORM if eps else _RMS)} | found


def num_layers(fields: GgufFields) -> int:
    """Without those that only draft (multi-token prediction)."""
    return fields.count("block_count") - fields.count("nextn_predict_layers", 0, low=0)


def has_sigmoid_gates(model: GgufModel, fields: GgufFields) -> bool:
    """Whether DeepSeek's experts are chosen so. Where a file does not say, as first ones of V2 and GLM 4.7 Flash do
    not, it is where the choice is corrected, as in all but V2.

    Raises:
        ModelConfigError: they are chosen otherwise.
    """
    is_corrected = any(name.endswith("exp_probs_b.bias") for name in model.tensors)
    gates = fields.count("expert_gating_func", _SIGMOID if is_corrected else _SOFTMAX)
    if gates not in (_SOFTMAX, _SIGMOID):
        raise fields.refusal("expert_gating_func", f"is {gates}, and 1 (softmax) and 2 (sigmoid) are run")
    return gates == _SIGMOID


def _check_sigmoid(model: GgufModel, fields: GgufFields) -> None:
    if not has_sigmoid_gates(model, fields):
        raise fields.refusal("expert_gating_func", f"is not {_SIGMOID} (sigmoid), which alone is run")


def _llama(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_still(fields)
    return {}


def _check_still(fields: GgufFields) -> None:
    if fields.has("attention.temperature_scale"):
        raise fields.refusal("attention.temperature_scale", "asks for queries that grow, which is not run")


def _mixtral(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": None} | _experts(fields, "num_local_experts")


def _qwen_experts(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    width = _rows(model, "blk.0.ffn_gate_exps.weight")
    return {
        "moe_intermediate_size": fields.count("expert_feed_forward_length", width),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    } | _experts(fields, "num_experts")


def _qwen2_moe(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    width = _rows(model, "blk.0.ffn_gate_shexp.weight")
    return _qwen_experts(model, fields, config) | {
        "shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length", width),
        "norm_topk_prob": False,
    }


def _olmoe(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": False} | _experts(fields, "num_experts")


def _olmo3(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation is stretched where there is no window."""
    return {"sliding_window": fields.count("attention.sliding_window")} | _windows(fields, config)


def _exaone4(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """First files of the 32B leave its windows out."""
    found = _windows(fields, config)
    if not found and config["num_hidden_layers"] != _EXAONE4_LAYERS:
        return {"sliding_window": None}
    return {"sliding_window": fields.count("attention.sliding_window", 4096)} | found


def _windows(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have one, where the file says so."""
    if not fields.has("attention.sliding_window_pattern"):
        return {}
    windows = fields.numbers("attention.sliding_window_pattern", config["num_hidden_layers"])
    return {"layer_types": [f"{'sliding' if window else 'full'}_attention" for window in windows]}


def _ernie(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in model.tensors}


def _ernie_experts(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.count("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise fields.refusal("expert_gating_func", f"is not {_SOFTMAX} (softmax), which alone is run")
    own = {
        "moe_num_shared_experts": fields.count("expert_shared_count", 0, low=0),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "moe_layer_start_index": fields.count("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": fields.count("interleave_moe_layer_step", 1),
    }
    return _ernie(model, fields, config) | own | _experts(fields, "num_experts")


def _dots1(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_sigmoid(model, fields)
    return _experts_and_shared(fields) | {
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": None,
    }


def _gemma(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of Gemma 2 and 3."""
    kind, scalar = config["model_type"], config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[kind]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    window = fields.count("attention.sliding_window", 4096 if kind == "gemma2" else 1024)
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar, "sliding_window": window}
    if kind == "gemma2":
        found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
    else:
        found["rope_theta"] = fields.number("rope.freq_base", 1_000_000.0)
        found["rope_local_base_freq"] = 10_000.0
    return found


def _granite(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _granite_moe(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return _granite(model, fields, config) | _experts(fields, "num_local_experts")


def _gpt_oss(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Where its rotation is stretched, it begins and ends between two pairs of a head."""
    scaling = config.get("rope_scaling")
    return {
        "intermediate_size": fields.count("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": fields.count("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
    } | _experts(fields, "num_local_experts")


def _cohere(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": fields.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


def _cohere2(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": fields.number("logit_scale"),
        "sliding_window": fields.count("attention.sliding_window"),
        "sliding_window_pattern": _COHERE2_PERIOD,
    }


def _phi3(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.count("attention.sliding_window", 0, low=0)
    length = config["max_position_embeddings"]
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length", length),
    }


def _phi(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"merged_qkv": "blk.0.attn_qkv.weight" in model.tensors}


def _phimoe(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    found = _phi3(model, fields, config) | _mixtral(model, fields, config)
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "longrope":
        magnitudes = {"short_mscale": _PHIMOE_MAGNITUDE, "long_mscale": _PHIMOE_MAGNITUDE}
        found["rope_scaling"] = {**scaling, **magnitudes}
    return found | {"lm_head_bias": "output.bias" in model.tensors}


def _gpt2(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"]}


def _falcon(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """As its newer files have it, which the older ones are a case of."""
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": config["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in model.tensors else 1,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _bloom(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_own_heads(fields, config)
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        raise fields.refusal("feed_forward_length", "is not four times the width, which is not run")
    return {}


def _mpt(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file says of clipping and ALiBi alone how it attends."""
    _check_own_heads(fields, config)
    if config["intermediate_size"] % config["hidden_size"]:
        raise fields.refusal("feed_forward_length", "is no multiple of the width, which is not run")
    bias = fields.number("attention.max_alibi_bias", 0.0)
    if bias <= 0.0:
        raise fields.refusal("attention.max_alibi_bias", "is 0, and only models with ALiBi are run")
    clip = fields.number("attention.clamp_kqv", 0.0)
    return {
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "attn_config": {"alibi": True, "alibi_bias_max": bias, "clip_qkv": clip or None},
    }


def _check_own_heads(fields: GgufFields, config: Mapping[str, Any]) -> None:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise fields.refusal("attention.head_count_kv", "is not that of all heads, which is not run")


def _stablelm(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with one norm has attention and MLP side by side, whatever the metadata say."""
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in model.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in model.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in model.tensors,
    }


def _glm4_moe(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return _experts_and_shared(fields) | {
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


def _deepseek(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The size of heads is that of the model's own, where newer files state that of latents as another."""
    _check_still(fields)
    rotated, scaling = fields.count("rope.dimension_count"), config.get("rope_scaling")
    count = fields.count("expert_count")
    groups, top_groups = _DEEPSEEK_GROUPS.get(count, (1, 1))
    groups = fields.count("expert_group_count", groups)
    found = _experts_and_shared(fields) | {
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "q_lora_rank": fields.count("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": config["head_dim"] - rotated,
        "v_head_dim": fields.count("attention.value_length_mla", fields.count("attention.value_length")),
        "kv_b_apart": "blk.0.attn_k_b.weight" in model.tensors,
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": fields.count("expert_group_used_count", top_groups),
    }
    if config["model_type"] == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if scaling is not None and scaling["rope_type"] == "yarn" and fields.has("rope.scaling.yarn_log_multiplier"):
        mscale = fields.number("rope.scaling.yarn_log_multiplier") / _YARN_LOG
        found["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return found


def _smollm3(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": _SMOLLM3_PERIOD}


def _minimax_m2(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_sigmoid(model, fields)
    return {
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    } | _experts(fields, "num_local_experts")


def _hunyuan_experts(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": fields.count("expert_feed_forward_length")} | _experts(fields, "num_experts")


def _gemma3n(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """The share of gates that is cut off is stated as how many deviations that is over the mean."""
    layers = config["num_hidden_layers"]
    deviations = fields.numbers("activation_sparsity_scale", layers)
    found: dict[str, Any] = {
        "vocab_size_per_layer_input": _rows(model, "per_layer_token_embd.weight"),
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input"),
        "altup_num_inputs": fields.count("altup.num_inputs"),
        "altup_active_idx": fields.count("altup.active_idx", low=0),
        "num_kv_shared_layers": fields.count("attention.shared_kv_layers", low=0),
        "laurel_rank": _rows(model, "blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": [NormalDist().cdf(deviation) for deviation in deviations],
        "sliding_window": fields.count("attention.sliding_window"),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
    }
    return found | _windows(fields, config)


def _llama4(model: GgufModel, fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a file leaves out (chunks, layers that do not rotate, growth of queries) is as our defaults are."""
    return {
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.count("interleave_moe_layer_step"),
        "use_qk_norm": fields.count("expert_count") != _LLAMA4_WITHOUT_NORMS,
    } | _experts(fields, "num_local_experts")


def _experts_and_shared(fields: GgufFields) -> dict[str, Any]:
    """As DeepSeek's configurations have them, and GLM's."""
    return {
        "n_shared_experts": fields.count("expert_shared_count", 1, low=0),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": fields.count("nextn_predict_layers", 0, low=0),
    } | _experts(fields, "n_routed_experts")


def _experts(fields: GgufFields, called: str) -> dict[str, Any]:
    """How many there are, as configurations of a kind call it, and how many a token chooses."""
    return {called: fields.count("expert_count"), "num_experts_per_tok": fields.count("expert_used_count")}


def _rows(model: GgufModel, name: str) -> int | None:
    """Of a matrix, or of each of a stack; None: the file has none of that name."""
    tensor = model.tensors.get(name)
    return None if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]


_READERS: Mapping[str, Callable[[GgufModel, GgufFields, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen_experts,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "llama4_text": _llama4,
    "gemma3n_text": _gemma3n,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "phi": _phi,
    "phimoe": _phimoe,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "stablelm": _stablelm,
    "smollm3": _smollm3,
    "minimax_m2": _minimax_m2,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_experts,
    "dots1": _dots1,
    "hunyuan_v1_moe": _hunyuan_experts,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
"""Of the kinds that have more than all."""
