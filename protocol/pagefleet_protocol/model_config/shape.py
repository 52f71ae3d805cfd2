"""From a configuration to the sizes that decide memory, context and what is served, for every kind of model that runs.

What only the engine needs of a kind, it reads from `ModelShape.fields` in `pagefleet_engine.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError
from pagefleet_protocol.model_config.kv_spec import KVSpec

# Far over any model there is: a damaged number must not build layers until memory is full.
_MAX_LAYERS = 4096
_MAX_LENGTH = 2**31 - 1
_SLIDING = "sliding_attention"
_FULL = "full_attention"
_QUANTIZED_TYPES = {"float": "fp8", "int": "int8"}
_HEADS = ("Classification", "QuestionAnswering", "RewardModel", "MultipleChoice", "TokenPrediction")
"""Ends of the names of models that give no next token."""

Windows = tuple[int | None, ...]
"""Per layer: how many tokens each token sees, itself included; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a configuration says, with every default and every old spelling settled. Lengths are in tokens."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    kv: KVSpec
    """What each layer keeps of a token."""
    windows: Windows
    context_length: int
    """Most positions the model was made for, rope scaling included."""
    default_length: int
    """Longest sequence to serve unless asked for: the context length, or less where more would cost quality."""
    dtype: str
    """Type of the checkpoint as the configuration names it, e.g. `bfloat16`; float32 when it does not."""
    fields: ConfigFields
    """Of the text model, with the defaults of its kind."""
    outer: ConfigFields
    """The whole configuration: the same, or of a model of text and images."""


def read_shape(config: Mapping[str, Any], source: str) -> ModelShape:
    """Read a configuration; `source` names it in errors.

    Raises:
        ModelConfigError: a value cannot be, or pagefleet does not run this kind of model.
    """
    outer = ConfigFields(config, source)
    model_type = outer.text("model_type", "")
    family = _FAMILIES.get(model_type)
    if family is None:
        said = model_type[:80] or "not given"
        raise ModelConfigError(f"{source}: model_type is {said}; pagefleet runs {', '.join(_FAMILIES)}")
    _check_head(outer)
    fields = outer
    if model_type == "gemma3":  # of text and images; the text model is served
        fields = outer.section("text_config", ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"))
    fields = fields.with_defaults(family.defaults)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim, kv = family.heads(fields, hidden_size, num_heads)
    num_layers = fields.count("num_hidden_layers", high=_MAX_LAYERS)
    context_length, default_length = family.lengths(fields)
    return ModelShape(
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv.heads,
        head_dim=head_dim,
        kv=kv,
        windows=family.windows(fields, num_layers),
        context_length=context_length,
        default_length=default_length,
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        fields=fields,
        outer=outer,
    )


def _check_head(fields: ConfigFields) -> None:
    """Refuse a model that does not end in a vocabulary: it has no tensor that gives tokens."""
    named = fields.texts("architectures")
    if named and named[0].endswith(_HEADS):
        raise ModelConfigError(
            f"{fields.source}: architectures is {named[0][:80]}: this model classifies or scores text and generates "
            "none; give one whose architectures ends with ForCausalLM"
        )


def _paired_heads(fields: ConfigFields, hidden_size: int, num_heads: int) -> tuple[int, KVSpec]:
    """The size of a head; keys and values are as large."""
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelConfigError(
            f"{fields.source}: {num_heads} heads of size {head_dim} over {num_kv_heads} key/value heads cannot be: the "
            "size must be even, and the first number a multiple of the last; repair the file"
        )
    return head_dim, KVSpec.pairs(num_kv_heads, head_dim)


def _latent_heads(fields: ConfigFields, hidden_size: int, num_heads: int) -> tuple[int, KVSpec]:
    """The size of a query: what is compared with latents, and the part that rotates."""
    rope_dim = fields.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelConfigError(f"{fields.source}: qk_rope_head_dim is {rope_dim}, and must be even: repair the file")
    return fields.count("qk_nope_head_dim") + rope_dim, KVSpec.latent(fields.count("kv_lora_rank"), rope_dim)


def _no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _uniform_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """`sliding_window` for every layer; none when it is null."""
    return (fields.count("sliding_window") if fields.present("sliding_window") else None,) * num_layers


def _qwen_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Of those after the first `max_window_layers`; only where the configuration asks for it."""
    if not fields.flag("use_sliding_window", False) or not fields.present("sliding_window"):
        return (None,) * num_layers
    first = fields.count("max_window_layers", 28, low=0)
    return _named_windows(fields, num_layers, lambda layer: layer >= first)


def _qwen2_moe_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Of every other one of the first `max_window_layers`, where the configuration asks for it."""
    if not fields.flag("use_sliding_window", False) or not fields.count("sliding_window", low=0):
        return (None,) * num_layers
    most = fields.count("max_window_layers", 28, low=0)
    return _named_windows(fields, num_layers, lambda layer: layer % 2 == 0 and layer < most)


def _qwen3_moe_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Of every layer, where the configuration asks for it."""
    return _uniform_windows(fields, num_layers) if fields.flag("use_sliding_window", False) else (None,) * num_layers


def _gemma2_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """The first of every two layers."""
    return _named_windows(fields, num_layers, lambda layer: layer % 2 == 0)


def _gemma3_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """All but the last of every `sliding_window_pattern` layers."""
    period = fields.count("sliding_window_pattern")
    return _named_windows(fields, num_layers, lambda layer: (layer + 1) % period != 0)


def _named_windows(fields: ConfigFields, num_layers: int, otherwise: Callable[[int], bool]) -> Windows:
    """Of the layers that `layer_types` calls sliding; where it is absent, of those that `otherwise` tells."""
    kinds = fields.choices("layer_types", num_layers, (_FULL, _SLIDING))
    slides = [otherwise(layer) if kinds is None else kinds[layer] == _SLIDING for layer in range(num_layers)]
    window = fields.count("sliding_window") if any(slides) else None
    return tuple(window if slide else None for slide in slides)


def _rope_lengths(fields: ConfigFields) -> tuple[int, int]:
    """The longest sequence with the rotation stretched, and the longest that costs shorter ones no quality."""
    given = fields.count("max_position_embeddings")
    scaling = fields.section("rope_parameters" if fields.present("rope_parameters") else "rope_scaling")
    if nested := scaling.section_names():
        said = f"separate values for {', '.join(nested)[:80]} are not supported; give one set for all layers"
        raise ModelConfigError(f"{scaling.source}: {said}")
    match scaling.text("rope_type", scaling.text("type", "default")):
        case "default" | "llama3":
            return given, given
        case "linear" | "dynamic":
            stretched = given * scaling.number("factor")
        case "yarn":
            original = scaling.count("original_max_position_embeddings", given)
            stretched = max(given, original * scaling.number("factor", given / original))
        case "longrope" | "su":  # its first name
            where = fields if fields.present("original_max_position_embeddings") else scaling
            return given, min(given, where.count("original_max_position_embeddings", given, low=2))
        case unknown:
            known = "default, linear, dynamic, llama3, yarn, longrope"
            raise ModelConfigError(f"{scaling.source}: rope_type is {unknown[:80]}; pagefleet knows {known}")
    if not 1 <= stretched <= _MAX_LENGTH:
        raise ModelConfigError(f"{scaling.source}: factor stretches the context to {stretched:g}: repair the file")
    return int(stretched), int(stretched)


def _given_lengths(fields: ConfigFields) -> tuple[int, int]:
    """Gemma 3 states the length with its rotations already stretched."""
    given = fields.count("max_position_embeddings")
    return given, given


def quantized_as(fields: ConfigFields) -> str:
    """Return fp8 or int8 where matrices are stored so, else an empty text; the engine reads how in detail.

    Raises:
        ModelConfigError: they are stored in another form.
    """
    if not fields.present("quantization_config"):
        return ""
    section = fields.section("quantization_config")
    match section.text("quant_method", ""):
        case "fp8":
            return "fp8"
        case "compressed-tensors":
            groups = section.section("config_groups")
            kinds = {groups.section(name).section("weights").text("type", "int") for name in groups.section_names()}
            names = sorted(_QUANTIZED_TYPES.get(kind, kind) for kind in kinds)
            if len(names) == 1 and names[0] in _QUANTIZED_TYPES.values():
                return names[0]
            method = f"compressed-tensors of {', '.join(names)[:80] or 'no groups'}"
        case other:
            method = other[:80] or "not given"
    raise ModelConfigError(
        f"{section.source}: quant_method is {method}; pagefleet runs fp8, and fp8 or int8 of compressed-tensors: "
        "choose one of these checkpoints, or one without quantization"
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a kind of model differs. `defaults` are those of its configuration class in transformers."""

    windows: Callable[[ConfigFields, int], Windows] = _no_windows
    lengths: Callable[[ConfigFields], tuple[int, int]] = _rope_lengths
    heads: Callable[[ConfigFields, int, int], tuple[int, KVSpec]] = _paired_heads
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA2 = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
}
_GEMMA3 = {
    **{name: value for name, value in _GEMMA2.items() if not name.endswith("softcapping")},
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
}
_PHI3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_OLMO2 = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
_GLM4_MOE = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
}
_DEEPSEEK_V2 = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "eos_token_id": 2,
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK_V2,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 1,
}
_GRANITE_MOE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
_MIXTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
_OLMOE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "eos_token_id": 50279,
}
_QWEN2_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_QWEN3_MOE = {
    **{name: value for name, value in _QWEN2_MOE.items() if not name.startswith("shared")},
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096}
_FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(heads=_latent_heads, defaults=_DEEPSEEK_V2),
    "deepseek_v3": _Family(heads=_latent_heads, defaults=_DEEPSEEK_V3),
    "gemma2": _Family(_gemma2_windows, defaults=_GEMMA2),
    "gemma3": _Family(_gemma3_windows, _given_lengths, defaults=_GEMMA3),
    "gemma3_text": _Family(_gemma3_windows, _given_lengths, defaults=_GEMMA3),
    "glm4_moe": _Family(defaults=_GLM4_MOE),
    "granitemoe": _Family(defaults=_GRANITE_MOE),
    "kimi_k2": _Family(heads=_latent_heads, defaults=_DEEPSEEK_V3),
    "llama": _Family(),
    "mistral": _Family(_uniform_windows, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": _Family(_uniform_windows, defaults=_MIXTRAL),
    "olmo2": _Family(defaults=_OLMO2),
    "olmoe": _Family(defaults=_OLMOE),
    "phi3": _Family(_uniform_windows, defaults=_PHI3),
    "qwen2": _Family(_qwen_windows, defaults=_QWEN2),
    "qwen2_moe": _Family(_qwen2_moe_windows, defaults=_QWEN2_MOE),
    "qwen3": _Family(_qwen_windows, defaults={**_QWEN2, "head_dim": 128}),
    "qwen3_moe": _Family(_qwen3_moe_windows, defaults=_QWEN3_MOE),
}
MODEL_TYPES = tuple(_FAMILIES)
"""Every `model_type` that runs."""
