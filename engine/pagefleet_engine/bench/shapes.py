"""Models of real shapes for measuring without a checkpoint: a configuration each, the weights are random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet_engine.bench.dense_shapes import DENSE_SHAPES
from pagefleet_engine.bench.expert_shapes import EXPERT_SHAPES
from pagefleet_engine.bench.shapes_2025 import SHAPES_2025
from pagefleet_engine.engine_core.model_folder import resolve_model_folder

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
    small = {"llama-125m": _LLAMA_125M, "llama-1m": _LLAMA_1M}
    return {**DENSE_SHAPES, **EXPERT_SHAPES, **SHAPES_2025, **small}


def write_shape(name: str, folder: Path) -> Path:
    """Make `folder` a model folder without weights: load it with `load_format="dummy"`.

    The tokenizer is the embedded model's: a server wants one, and benchmarks speak token ids.
    """
    embedded = resolve_model_folder("builtin://tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / file, folder / file)
    (folder / "config.json").write_text(json.dumps(named_shapes()[name], indent=2), encoding="utf-8")
    return folder
