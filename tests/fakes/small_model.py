"""A model folder with a tiny shape and no weights, for `load_format="dummy"`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.small_tokenizers import byte_level_backend

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 384
CONTEXT = 256


WINDOW = 40
"""Of `WINDOWS`."""
WINDOWS = {
    "full and window": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3,
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    },
    "windows alone": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW,
    },
    "full and chunks": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 3, "head_dim": 8,
        "attention_chunk_size": WINDOW, "no_rope_layers": [0, 1, 1], "floor_scale": 32, "intermediate_size_mlp": 64,
        "num_local_experts": 4, "moe_layers": [1],
    },
}  # fmt: skip
"""Changes that make models whose layers see different parts of the context."""
LATENTS: dict[str, object] = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
"""Changes that make one whose layers keep a latent of each token."""


def write_small_model(folder: Path, **changes: object) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json; returns the folder."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "float32",
        "eos_token_id": 1,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder
