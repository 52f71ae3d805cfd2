"""Models of real shapes for measuring without a checkpoint: a configuration each, the weights are random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet_engine.bench.expert_shapes import EXPERT_SHAPES
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
_GEMMA3N_E4B = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 64,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 50256,
    "torch_dtype": "float32",
}
_FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "alibi": False,
    "bias": False,
    "vocab_size": 65024,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 11,
    "torch_dtype": "bfloat16",
}
_PHI2 = {
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": False,
    "eos_token_id": 50256,
    "torch_dtype": "float16",
}
_GEMMA_7B = {
    "model_type": "gemma",
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "gelu_pytorch_tanh",
    "eos_token_id": 1,
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
        "gemma-3n-e4b": _GEMMA3N_E4B,
        **EXPERT_SHAPES,
        "gpt2": _GPT2,
        "falcon-7b": _FALCON_7B,
        "phi-2": _PHI2,
        "gemma-7b": _GEMMA_7B,
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
