"""Models of real shapes for measuring without a checkpoint: a configuration each, the weights are random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet_engine.engine_core.model_folder import resolve_model_folder

_LLAMA_31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_QWEN3_06B = _QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_GEMMA3_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_OLMOE_7B = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 50279,
    "torch_dtype": "bfloat16",
}
_GRANITE_31_3B_A800M = {
    "model_type": "granitemoe",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "num_experts_per_tok": 8,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "vocab_size": 49155,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
_GLM_45_AIR = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338],
    "torch_dtype": "bfloat16",
}
_LLAMA_125M = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_LLAMA_1M = _LLAMA_125M | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2000,
}


def named_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Configurations by name, as published with the models; the last two are for machines without a GPU."""
    return {
        "llama-3.1-8b": _LLAMA_31_8B,
        "qwen3-8b": _QWEN3_8B,
        "qwen3-0.6b": _QWEN3_06B,
        "gemma-3-4b": _GEMMA3_4B,
        "mixtral-8x7b": _MIXTRAL_8X7B,
        "qwen1.5-moe-a2.7b": _QWEN15_MOE,
        "qwen3-30b-a3b": _QWEN3_30B_A3B,
        "olmoe-1b-7b": _OLMOE_7B,
        "granite-3.1-3b-a800m": _GRANITE_31_3B_A800M,
        "glm-4.5-air": _GLM_45_AIR,
        "llama-125m": _LLAMA_125M,
        "llama-1m": _LLAMA_1M,
    }


def write_shape(name: str, folder: Path) -> Path:
    """Make `folder` a model folder without weights: load it with `load_format="dummy"`.

    The tokenizer is the embedded model's: a server wants one, and benchmarks speak token ids.
    """
    embedded = resolve_model_folder("builtin://tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / file, folder / file)
    (folder / "config.json").write_text(json.dumps(named_shapes()[name], indent=2), encoding="utf-8")
    return folder
