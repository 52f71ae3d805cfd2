"""Small random checkpoints, made by transformers itself so that its code and ours read the same files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that logits spread and greedy choices are clear
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLASSES = {
    "bloom": "Bloom",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "dots1": "Dots1",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "exaone4": "Exaone4",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "gemma3n_text": "Gemma3n",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt2": "GPT2",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granitemoe": "GraniteMoe",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "llama": "Llama",
    "llama4_text": "Llama4",
    "minimax_m2": "MiniMaxM2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "mpt": "Mpt",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "opt": "OPT",
    "phi": "Phi",
    "phi3": "Phi3",
    "phimoe": "Phimoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
}
FAMILIES = tuple(_CLASSES)
_CONFIGS = {
    "gemma3_text": "Gemma3TextConfig",
    "gemma3n_text": "Gemma3nTextConfig",
    "llama4_text": "Llama4TextConfig",
}
# The same under the names that these kinds have for it
_SPELLINGS = {
    "gpt2": {"intermediate_size": "n_inner"},
    "mpt": {"max_position_embeddings": "max_seq_len"},
    "opt": {"intermediate_size": "ffn_dim"},
}
# For the eight pairs of a head of 16
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
}
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK | {"q_lora_rank": 40},
    "dots1": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": False, "pad_token_id": 0},
    "ernie4_5_moe": {
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "moe_intermediate_size": 48,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2},
    "glm": {"head_dim": 32, "pad_token_id": 0},
    "glm4": {"head_dim": 32, "pad_token_id": 0},
    "hunyuan_v1_dense": {
        "head_dim": 32,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": {
        "head_dim": 32,
        "pad_token_id": 0,
        "intermediate_size": 48,
        "num_experts": 8,
        "moe_topk": 3,
    },
    "olmo3": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "bloom": {"tie_word_embeddings": False},
    "falcon": {"tie_word_embeddings": False},
    "gpt2": {"tie_word_embeddings": False},
    "mpt": {"tie_word_embeddings": False},
    "opt": {"tie_word_embeddings": False, "pad_token_id": 0},
    "cohere": {"tie_word_embeddings": False, "logit_scale": 0.5},
    "cohere2": {
        "tie_word_embeddings": False,
        "logit_scale": 0.5,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma": {"tie_word_embeddings": False, "head_dim": 32},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "phimoe": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    # A tied head would make these repeat their last token: what the embedding is multiplied by outweighs the layers.
    "gemma2": {
        "tie_word_embeddings": False,
        "sliding_window": 24,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": False,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    # The last two layers read what the second and third keep; the first and the last cut their gates.
    "gemma3n_text": {
        "tie_word_embeddings": False,
        "num_hidden_layers": 5,
        "sliding_window": 24,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")],
        "head_dim": 32,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.7],
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 24,
        "laurel_rank": 8,
        "altup_num_inputs": 3,
        "pad_token_id": 0,
    },
    "glm4_moe": {
        "head_dim": 32,
        "use_qk_norm": True,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {field: value for field, value in _DEEPSEEK.items() if field != "first_k_dense_replace"}
    | {"q_lora_rank": 40},
    "gpt_oss": {
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "granitemoe": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "llama4_text": {
        "head_dim": 32,
        "intermediate_size": 48,
        "intermediate_size_mlp": 80,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 24,
        "floor_scale": 16,
    },
    "minimax_m2": {
        "head_dim": 32,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mistral": {"sliding_window": 24},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4, "sliding_window": 24},
    "olmoe": {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0},
    "phi3": {
        "sliding_window": 24,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 512,
        "rope_parameters": LONGROPE,
        "pad_token_id": 0,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "seed_oss": {"head_dim": 32},
    "smollm3": {"tie_word_embeddings": False, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
}


# Families that store the weights of norms so
_LESS_ONE = ("gemma", "gemma2", "gemma3_text")


def save_checkpoint(folder: Path, arch_name: str, dtype: str, shard_size: str, overrides: dict[str, Any]) -> None:
    """Write config.json and weights of a model of the family; norms and biases are random too."""
    name = _CLASSES[arch_name]
    spellings = _SPELLINGS.get(arch_name, {})
    fields = {spellings.get(field, field): value for field, value in _TINY.items()}
    config = getattr(transformers, _CONFIGS.get(arch_name, f"{name}Config"))(
        **(fields | _FAMILY.get(arch_name, {}) | overrides)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in parameter_name or parameter_name.endswith("_bias"):
            is_norm = parameter_name.endswith(".weight") and arch_name not in _LESS_ONE
            centre = 1.0 if is_norm else 0.0
            torch.nn.init.normal_(parameter, mean=centre, std=0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def reference_model(folder: Path) -> Any:
    """transformers' own model of the folder, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    # Its Falcon adds ALiBi twice in "eager".
    how = "sdpa" if config.model_type == "falcon" else "eager"
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=how)
    return model.eval()


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Write a checkpoint of one file again with other tensors, or without those that are None."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()} | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
