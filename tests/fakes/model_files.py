"""Files of a tiny model, as they lie in a repository: what is wanted, and what must never be."""

from __future__ import annotations

import json

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def safetensors(num_bytes: int, seed: int = 0) -> bytes:
    """A file with one tensor of so many bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    pattern = bytes((seed + 7 * at) % 251 for at in range(251))
    return len(header).to_bytes(8, "little") + header + (pattern * (num_bytes // 251 + 1))[:num_bytes]


def sharded(num_bytes: int = 5000, seed: int = 0) -> dict[str, bytes]:
    """A model of two shards with everything that lies beside them in a repository."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    return {
        ".gitattributes": b"* lfs",
        "README.md": b"# model",
        "config.json": json.dumps(QWEN3).encode(),
        "generation_config.json": b"{}",
        "merges.txt": b"a b",
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer.json": b'{"version": "1.0"}',
        "modeling_evil.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickled",
        "consolidated.safetensors": safetensors(2 * num_bytes),
        "original/params.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: safetensors(num_bytes, seed),
        names[1]: safetensors(num_bytes + 1, seed),
    }


WANTED = {
    "config.json",
    "generation_config.json",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
