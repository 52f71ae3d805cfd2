"""A model's config.json, from the metadata of its GGUF file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_names import our_tensors

_KINDS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""`general.architecture` and our `model_type`."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Those scale queries by the width of the model over its heads, and the file does not say so."""
KEPT: Mapping[str, tuple[int, int | None]] = {
    "Q2_K": (192, None),
    "Q3_K": (160, None),
    "Q4_0": (18, 20),
    "Q4_1": (20, None),
    "Q5_0": (34, 36),
    "Q5_1": (36, None),
    "Q8_0": (34, 36),
    "Q4_K": (160, None),
    "Q5_K": (288, None),
    "Q6_K": (288, None),
    "IQ4_NL": (18, None),
    "IQ4_XS": (144, None),
    "MXFP4": (18, None),
}
"""Bytes that a block of a matrix takes on a CPU and on a GPU; None: its numbers become floats."""
_MOST_EXPERTS = 1 << 12
_TYPES = {"F32": "float32", "F16": "float16"}


class Kind(Protocol):
    """See GgufKind."""

    @property
    def name(self) -> str: ...

    @property
    def numbers(self) -> int: ...


class Tensor(Protocol):
    """See HeaderTensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> Kind: ...


class GgufModel(Protocol):
    """What the headers of a model's files say; see GgufHeader."""

    @property
    def source(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class _Fields:
    """The metadata of the model's architecture, checked."""

    def __init__(self, model: GgufModel) -> None:
        self.source = model.source
        self._values = model.metadata
        self.architecture = self._values.get("general.architecture")

    def _found(self, name: str) -> Any:
        return self._values.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self._found(name)
        if isinstance(value, memoryview) and len(value) and len(set(value)) == 1:
            value = value[0]  # one for each layer
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.refusal(name, "is missing" if value is None else f"is {str(value)[:40]}")
        return value

    def has(self, name: str) -> bool:
        return self._found(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._found(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise self.refusal(name, "is missing or no number")
        return float(value)

    def text(self, name: str) -> str:
        return str(self._found(name) or "")

    def refusal(self, name: str, what: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {self.architecture}.{name} {what[:80]}: convert the model anew")


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
    return "mixtral" if kind == "llama" and model.metadata.get("llama.expert_count") else kind


def head_dim(model: GgufModel) -> int:
    """Of queries and keys.

    Raises:
        ModelConfigError: the file does not say.
    """
    fields = _Fields(model)
    heads, width = fields.count("attention.head_count"), fields.count("embedding_length")
    return fields.count("attention.key_length", max(1, width // heads))


def num_experts(model: GgufModel) -> int:
    """In a layer, as every stack of them has; 0: there are none.

    Raises:
        ModelConfigError: the file does not say, or a stack has another number.
    """
    if model_kind(model) not in ("mixtral", "qwen3_moe"):
        return 0
    fields = _Fields(model)
    count = fields.count("expert_count")
    if count > _MOST_EXPERTS:
        raise fields.refusal("expert_count", f"is {count}, and up to {_MOST_EXPERTS} are run")
    for name, tensor in model.tensors.items():
        if "_exps." in name and tensor.shape[0] != count:
            raise fields.refusal("expert_count", f"is {count}, and {name[:40]!a} has {tensor.shape[0]}")
    return count


def hf_config(model: GgufModel, factors: Sequence[float] | None) -> dict[str, Any]:
    """The configuration as Hugging Face spells it.

    `factors`: of the tensor `rope_freqs`, by which frequencies are divided.

    Raises:
        ModelConfigError: something is missing, or the model is of a kind that is not run.
    """
    fields, kind, embedding = _Fields(model), model_kind(model), model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelConfigError(f"{fields.source} has no token_embd.weight, as every model has: download it again")
    first = model.tensors.get("blk.0.attn_q.weight")
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": fields.count("attention.head_count_kv", fields.count("attention.head_count")),
        "head_dim": head_dim(model),
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in model.tensors,
        "torch_dtype": "bfloat16" if first is None else _TYPES.get(first.type.name, "bfloat16"),
    }
    rotated = fields.count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise fields.refusal("rope.dimension_count", f"is {rotated} of {config['head_dim']}, which is not run")
    scaling = _rope_scaling(fields, config["max_position_embeddings"], factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    experts = num_experts(model)
    types = _quantized(kind, model)
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config | _of_kind(kind, fields, config, experts)


def _of_kind(kind: str, fields: _Fields, config: Mapping[str, Any], experts: int) -> dict[str, Any]:
    match kind:
        case "mixtral":
            return {"num_local_experts": experts, "sliding_window": None} | _chosen(fields)
        case "qwen3_moe":
            return {
                "num_experts": experts,
                "moe_intermediate_size": fields.count("expert_feed_forward_length"),
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            } | _chosen(fields)
        case "gemma2" | "gemma3_text":
            scalar = config["head_dim"]
            if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[kind]:
                scalar = config["hidden_size"] // config["num_attention_heads"]
            found: dict[str, Any] = {
                "query_pre_attn_scalar": scalar,
                "sliding_window": fields.count("attention.sliding_window", 4096 if kind == "gemma2" else 1024),
            }
            if kind == "gemma2":
                found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
                found["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
            else:
                found["rope_theta"] = fields.number("rope.freq_base", 1_000_000.0)
                found["rope_local_base_freq"] = 10_000.0
            return found
        case _:
            return {}


def _quantized(kind: str, model: GgufModel) -> dict[str, list[str]]:
    """The linear layers that lie in blocks, by type; all experts by one expression."""
    found: dict[str, list[str]] = {}
    stacks: dict[str, list[str]] = {}
    for name, tensor in model.tensors.items():
        if tensor.type.numbers == 1 or len(tensor.shape) < 2 or name == "token_embd.weight":
            continue
        for ours in our_tensors(kind, name, 1) or ():  # the first expert stands for all
            layer = ours.name.rpartition(".")[0]
            if ours.expert is None:
                found.setdefault(tensor.type.name, []).append(layer)
            else:
                before, _, after = layer.rpartition(".0.")
                stacks.setdefault(tensor.type.name, []).append(rf"{re.escape(before)}\.\d+\.{re.escape(after)}")
    for of_type, stack in stacks.items():
        found.setdefault(of_type, []).insert(0, f"re:({'|'.join(stack)})$")
    return found


def _chosen(fields: _Fields) -> dict[str, Any]:
    return {"num_experts_per_tok": fields.count("expert_used_count")}


def _rope_scaling(fields: _Fields, length: int, factors: Sequence[float] | None) -> dict[str, Any] | None:
    if factors is not None:  # Llama 3's, one for each frequency: what LongRoPE is at any length
        each = list(factors)
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
            }
        case other:
            raise fields.refusal("rope.scaling.type", f"is {other}, and none, linear and yarn are run")


def kept_bytes(model: GgufModel) -> tuple[int, int]:
    """What the weights take on a CPU and on a GPU, in a type of two bytes where they are not kept in few bits.

    A lower bound: a GPU keeps projections that are computed as one in few bits only where all of them can be.
    """
    on_cpu = on_gpu = 0
    for name, tensor in model.tensors.items():
        count, own = math.prod(tensor.shape), KEPT.get(tensor.type.name)
        is_matrix = len(tensor.shape) > 1 and name != "token_embd.weight"
        cpu, gpu = own if own is not None and is_matrix else (None, None)
        blocks = count // tensor.type.numbers
        on_cpu += blocks * cpu if cpu is not None else 2 * count
        on_gpu += blocks * gpu if gpu is not None else 2 * count
    return on_cpu, on_gpu
