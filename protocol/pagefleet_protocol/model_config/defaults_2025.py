"""See defaults: of the models that came from 2025 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefleet_protocol.model_config.defaults import OLMO2

GLM4_MOE_LITE: Mapping[str, Any] = {
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "eos_token_id": 1,
}
MINIMAX_M2_SPELLINGS = {"num_mtp_modules": "num_nextn_predict_layers"}
MINIMAX_M2: Mapping[str, Any] = {
    "vocab_size": 200_064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "eos_token_id": 200_020,
}
SEED_OSS: Mapping[str, Any] = {
    "vocab_size": 155_136,
    "hidden_size": 4096,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "max_position_embeddings": 524_288,
    "eos_token_id": 2,
}
SMOLLM3: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "eos_token_id": 128_001,
}
GLM: Mapping[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}
OLMO3: Mapping[str, Any] = {
    **OLMO2,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
ERNIE4_5: Mapping[str, Any] = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
ERNIE4_5_MOE_SPELLINGS = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
ERNIE4_5_MOE: Mapping[str, Any] = {
    **{name: value for name, value in ERNIE4_5.items() if name != "head_dim"},
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
EXAONE4: Mapping[str, Any] = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "eos_token_id": 2,
}
HUNYUAN: Mapping[str, Any] = {
    "vocab_size": 290_943,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
HUNYUAN_MOE_SPELLINGS = {"moe_topk": "num_experts_per_tok"}
HUNYUAN_MOE: Mapping[str, Any] = {**HUNYUAN, "num_experts": 1, "num_experts_per_tok": 1}
DOTS1: Mapping[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 4608,
    "intermediate_size": 10_944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
