"""A model's config.json, from the metadata of its GGUF file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_fields import GgufFields, GgufModel
from pagefleet_protocol.model_config.gguf_kinds import has_sigmoid_gates, num_layers, of_kind
from pagefleet_protocol.model_config.gguf_names import our_tensors

_KINDS = {
    "llama": "llama",
    "mistral3": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "llama4": "llama4_text",
    "gemma3n": "gemma3n_text",
    "phi2": "phi",
    "phimoe": "phimoe",
    "gpt2": "gpt2",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "stablelm": "stablelm",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "minimax-m2": "minimax_m2",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "dots1": "dots1",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
}
"""`general.architecture` and our `model_type`; some metadata makes it another, see `model_kind`."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of numbers that frequencies are divided by: at all lengths, or up to the first context and beyond it."""
_MOST_EXPERTS = 1 << 12
_MAY_HAVE_BIASES = (
    *("phimoe", "llama", "granite", "granitemoe", "cohere", "olmo2", "olmoe", "glm4_moe"),
    *("smollm3", "seed_oss", "glm4", "olmo3", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe"),
)
_ROTATE_IN_PART = ("phi3", "glm4_moe", "phi", "stablelm", "minimax_m2", "glm4")
_LATENT = ("deepseek_v2", "deepseek_v3")
_EMBEDDING = "token_embd.weight"
_TABLES = (_EMBEDDING, "per_layer_token_embd.weight")
"""Of which a step looks up a row for each token: a CPU keeps them in blocks, a GPU makes numbers of them."""
_POSITIONS = "position_embd.weight"
"""It becomes numbers."""
_TYPES = {"F32": "float32", "F16": "float16"}


def model_kind(model: GgufModel) -> str:
    """Our `model_type`.

    Raises:
        ModelConfigError: models of its kind are not run from GGUF.
    """
    said = model.metadata.get("general.architecture")
    kind = _KINDS.get(said) if isinstance(said, str) else None
    if kind is None:
        raise ModelConfigError(
            f"{model.source}: models of the architecture {str(said)[:40]!a} are not run from GGUF, only "
            f"{', '.join(_KINDS)}: give its safetensors"
        )
    if kind == "llama" and model.metadata.get("llama.expert_count"):
        return "mixtral"
    if kind == "olmo2" and GgufFields(model).has("attention.sliding_window"):
        return "olmo3"
    return "deepseek_v3" if kind == "deepseek_v2" and has_sigmoid_gates(model, GgufFields(model)) else kind


def head_dim(model: GgufModel) -> int:
    """Of queries and keys.

    Raises:
        ModelConfigError: the file does not say.
    """
    fields = GgufFields(model)
    heads, width = fields.count("attention.head_count"), fields.count("embedding_length")
    dim = fields.count("attention.key_length", max(1, width // heads))
    return fields.count("attention.key_length_mla", dim)


def num_stacked(model: GgufModel) -> int:
    """Matrices that every stack has: of a layer's experts, or of the versions of Gemma 3n's stream but the first.

    Raises:
        ModelConfigError: the file does not say, or a stack has another number.
    """
    fields = GgufFields(model)
    told, less = ("altup.num_inputs", 1) if fields.has("altup.num_inputs") else ("expert_count", 0)
    count = fields.count(told, 0, low=less)
    if count > _MOST_EXPERTS:
        raise fields.refusal(told, f"is {count}, and up to {_MOST_EXPERTS} are run")
    for name, tensor in model.tensors.items():
        if ("_exps." in name or name.startswith("altup_")) and tensor.shape[0] != count - less:
            raise fields.refusal(told, f"is {count}, and {name[:40]!a} has {tensor.shape[0]}")
    return count - less


def is_tied(model: GgufModel) -> bool:
    """Whether the head is the embedding."""
    return "output.weight" not in model.tensors


def hf_config(model: GgufModel, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The configuration as Hugging Face spells it.

    `factors`: what the file has of ROPE_FACTORS.

    Raises:
        ModelConfigError: something is missing, or the model is of a kind that is not run.
    """
    fields, kind, embedding = GgufFields(model), model_kind(model), model.tensors.get(_EMBEDDING)
    if embedding is None:
        raise ModelConfigError(f"{fields.source} has no token_embd.weight, as every model has: download it again")
    first = model.tensors.get("blk.0.attn_output.weight")
    num_stacked(model)  # which stacks have to have
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": num_layers(fields),
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": fields.count("attention.head_count_kv", fields.count("attention.head_count")),
        "head_dim": head_dim(model),
        "max_position_embeddings": fields.count("context_length"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": is_tied(model),
        "attention_bias": kind in _MAY_HAVE_BIASES and "blk.0.attn_q.bias" in model.tensors,
        "torch_dtype": "bfloat16" if first is None else _TYPES.get(first.type.name, "bfloat16"),
        "gguf_layout": True,
    }
    rotated = fields.count("rope.dimension_count", config["head_dim"])
    if kind in _ROTATE_IN_PART:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    elif kind not in _LATENT and rotated != config["head_dim"]:
        raise fields.refusal("rope.dimension_count", f"is {rotated} of {config['head_dim']}, which is not run")
    scaling = _rope_scaling(fields, config["max_position_embeddings"], factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    types = _quantized(kind, model)
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config | of_kind(kind, model, fields, config)


def _quantized(kind: str, model: GgufModel) -> dict[str, list[str]]:
    """The linear layers and tables that lie in blocks, by type; all of a stack by one expression."""
    found: dict[str, list[str]] = {}
    stacks: dict[str, list[str]] = {}
    for name, tensor in model.tensors.items():
        if tensor.type.numbers == 1 or len(tensor.shape) < 2 or name == _POSITIONS:
            continue
        for ours in our_tensors(kind, name, 1, tied=is_tied(model)) or ():  # the first of a stack stands for all
            layer = ours.name.rpartition(".")[0]
            if ours.expert is None:
                found.setdefault(tensor.type.name, []).append(layer)
            else:
                before, _, after = f"{layer}.".rpartition(".0.")
                expression = rf"{re.escape(before)}\.\d+{re.escape(f'.{after}'.rstrip('.'))}"
                stacks.setdefault(tensor.type.name, []).append(expression)
    for of_type, stack in stacks.items():
        found.setdefault(of_type, []).insert(0, f"re:({'|'.join(stack)})$")
    return found


def _rope_scaling(fields: GgufFields, length: int, factors: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    for_all, short, long = (factors.get(name) for name in ROPE_FACTORS)
    if short is not None and long is not None:
        found: dict[str, Any] = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
        if fields.has("rope.scaling.attn_factor"):
            found["attention_factor"] = fields.number("rope.scaling.attn_factor")
        return found
    if for_all is not None:  # Llama 3's, one for each frequency: what LongRoPE is at any length
        each = list(for_all)
        return {
            "rope_type": "longrope",
            "short_factor": each,
            "long_factor": each,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    match fields.text("rope.scaling.type"):
        case "" | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": fields.number("rope.scaling.factor"),
                "original_max_position_embeddings": fields.count("rope.scaling.original_context_length", length),
                "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
            }
        case other:
            raise fields.refusal("rope.scaling.type", f"is {other}, and none, linear and yarn are run")


def kept_bytes(model: GgufModel) -> tuple[int, int]:
    """What the weights take on a CPU and on a GPU, in a type of two bytes where they are not kept in few bits.

    A head that is the embedding is kept a second time on a CPU, as products read it.
    A lower bound: a GPU keeps projections that are computed as one in few bits only where all of them can be.
    """
    on_cpu = on_gpu = 0
    for name, tensor in model.tensors.items():
        count, kind = math.prod(tensor.shape), tensor.type
        blocks, in_floats = count // kind.numbers, 2 * count
        is_table = name in _TABLES
        is_matrix = len(tensor.shape) > 1 and not is_table and name != _POSITIONS
        as_table, as_matrix = (
            (blocks * kind.num_bytes, blocks * kind.cpu_bytes) if kind.bits else (in_floats, in_floats)
        )
        on_cpu += as_table if is_table else as_matrix if is_matrix else in_floats
        on_gpu += blocks * kind.gpu_bytes if is_matrix and kind.on_gpu else in_floats
        if name == _EMBEDDING and is_tied(model):
            on_cpu += as_matrix
    return on_cpu, on_gpu
