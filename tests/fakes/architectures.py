"""Configurations of small models, as Hugging Face writes them."""

from __future__ import annotations

from typing import Any

from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import arch_from_config


def llama_config(**changes: Any) -> dict[str, Any]:
    """A Llama of two layers and 300 tokens, with grouped queries."""
    config = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
    return config | changes


def llama_arch(**changes: Any) -> ModelArch:
    """The same, read."""
    return arch_from_config(llama_config(**changes), "config.json")
