"""From a configuration to the sizes that decide memory, context and what is served, for every kind of model that runs.

What only the engine needs of a kind, it reads from `ModelShape.fields` in `pagefleet_engine.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_protocol.model_config import defaults, defaults_2025
from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError
from pagefleet_protocol.model_config.kv_spec import KVSpec

# Far over any model there is: a damaged number must not build layers until memory is full.
_MAX_LAYERS = 4096
_MAX_LENGTH = 2**31 - 1
_MAX_EXPERTS = 4096
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_FULL = "full_attention"
_HEADS = ("Classification", "QuestionAnswering", "RewardModel", "MultipleChoice", "TokenPrediction")
"""Ends of the names of models that give no next token."""

Windows = tuple[int | None, ...]
"""Per layer: how many tokens each token sees at most, itself included; None for all."""


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
    chunked: bool
    """Windows do not slide but are chunks: a token sees what is of its own chunk of so many tokens."""
    num_kv_shared_layers: int
    """The last layers, that keep nothing of a token: they read what an earlier layer of their kind keeps."""
    num_experts: int
    """That tokens choose from in a layer; 0: none has experts."""
    experts_per_token: int
    """That one token chooses."""
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

    @property
    def kept_windows(self) -> Windows:
        """Windows of the layers that keep something."""
        return self.windows[: self.num_layers - self.num_kv_shared_layers]


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
    if model_type in ("gemma3", "gemma3n", "llama4"):  # of text and images; the text model is served
        fields = outer.section("text_config", ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"))
    fields = fields.spelled(family.spellings).with_defaults(family.defaults)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim, kv = family.heads(fields, hidden_size, num_heads)
    num_layers = fields.count("num_hidden_layers", high=_MAX_LAYERS)
    windows = family.windows(fields, num_layers)
    context_length, default_length = family.lengths(fields)
    return ModelShape(
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv.heads,
        head_dim=head_dim,
        kv=kv,
        windows=windows,
        chunked=family.chunked,
        num_kv_shared_layers=_kv_shared_layers(fields, windows) if family.shares_kv else 0,
        num_experts=_num_experts(fields) if family.mixture else 0,
        experts_per_token=fields.one_count("num_experts_per_tok", num_layers) if family.mixture else 0,
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
    return _pairs(fields, hidden_size, num_heads, fields.count("num_key_value_heads", num_heads))


def _as_many_pairs(fields: ConfigFields, hidden_size: int, num_heads: int) -> tuple[int, KVSpec]:
    """Each query head has keys and values of its own."""
    return _pairs(fields, hidden_size, num_heads, num_heads)


def _falcon_heads(fields: ConfigFields, hidden_size: int, num_heads: int) -> tuple[int, KVSpec]:
    """As many keys as the file says since Falcon 40B; before that one, or as many as there are query heads."""
    if fields.flag("new_decoder_architecture", False):
        return _pairs(fields, hidden_size, num_heads, fields.count("num_kv_heads", num_heads))
    return _pairs(fields, hidden_size, num_heads, 1 if fields.flag("multi_query", True) else num_heads)


def _pairs(fields: ConfigFields, hidden_size: int, num_heads: int, num_kv_heads: int) -> tuple[int, KVSpec]:
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
    return _named_windows(fields, num_layers, lambda layer: (layer + 1) % fields.count("sliding_window_pattern") != 0)


def _exaone4_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """As Gemma 3's, where there is a `sliding_window`."""
    return _gemma3_windows(fields, num_layers) if fields.present("sliding_window") else (None,) * num_layers


def _dots1_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Of those after the first `max_window_layers`, where there is a `sliding_window`."""
    if not fields.present("sliding_window"):
        return (None,) * num_layers
    first = fields.count("max_window_layers", low=0)
    return _named_windows(fields, num_layers, lambda layer: layer >= first)


def rotated_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Llama 4's, and SmolLM3's: those with a 1 in `no_rope_layers`, or all but every `no_rope_layer_interval`th.

    Raises:
        ModelConfigError: the list is too short, or holds other numbers.
    """
    given = fields.integers("no_rope_layers")
    if not given:
        interval = fields.count("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(given) < num_layers or not {*given} <= {0, 1}:
        raise ModelConfigError(
            f"{fields.source}: no_rope_layers must be a list of 0 and 1, one for each of {num_layers} layers: repair "
            "the file"
        )
    return tuple(flag == 1 for flag in given[:num_layers])


def _smollm3_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Of the layers that do not rotate, where the configuration asks for it."""
    if not fields.flag("use_sliding_window", False) or not fields.present("sliding_window"):
        return (None,) * num_layers
    rotated = rotated_layers(fields, num_layers)
    return _named_windows(fields, num_layers, lambda layer: not rotated[layer])


def _llama4_chunks(fields: ConfigFields, num_layers: int) -> Windows:
    """Of the layers that rotate."""
    rotated = rotated_layers(fields, num_layers)
    return _named_windows(fields, num_layers, rotated.__getitem__, _CHUNKED, "attention_chunk_size")


def _named_windows(
    fields: ConfigFields,
    num_layers: int,
    otherwise: Callable[[int], bool],
    local: str = _SLIDING,
    size: str = "sliding_window",
) -> Windows:
    """Of the layers that `layer_types` calls `local`; where it is absent, of those that `otherwise` tells."""
    kinds = fields.choices("layer_types", num_layers, (_FULL, local))
    is_local = [otherwise(layer) if kinds is None else kinds[layer] == local for layer in range(num_layers)]
    window = fields.count(size) if any(is_local) else None
    return tuple(window if each else None for each in is_local)


def _kv_shared_layers(fields: ConfigFields, windows: Windows) -> int:
    """How many of the last layers read what others keep; each kind of them needs one that keeps it."""
    number = fields.count("num_kv_shared_layers", low=0)
    kept = windows[: max(0, len(windows) - number)]
    if not set(windows) <= set(kept):
        raise ModelConfigError(
            f"{fields.source}: num_kv_shared_layers is {number}, and the {len(windows)} layers then lack one before "
            "these of each kind in layer_types: repair the file"
        )
    return number


def _num_experts(fields: ConfigFields) -> int:
    """Under the names that families gave it; newer files of Qwen's models have the first for the last."""
    name = next(name for name in _EXPERTS if fields.present(name) or name == _EXPERTS[-1])
    return fields.count(name, high=_MAX_EXPERTS)


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
            stretched = given * scaling.number("factor", 1.0 if scaling.present("alpha") else None)
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
    """Gemma 3 and OLMo 3 state the length with their rotations already stretched; others do not rotate."""
    given = fields.count("max_position_embeddings")
    return given, given


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a kind of model differs. `defaults` are those of its configuration class in transformers."""

    windows: Callable[[ConfigFields, int], Windows] = _no_windows
    lengths: Callable[[ConfigFields], tuple[int, int]] = _rope_lengths
    heads: Callable[[ConfigFields, int, int], tuple[int, KVSpec]] = _paired_heads
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Names of its fields, and what others call the same."""
    chunked: bool = False
    """Its windows are chunks."""
    shares_kv: bool = False
    """Its last layers may read what earlier ones keep."""
    mixture: bool = False
    """Its layers, or some of them, have experts."""


_FAMILIES: Mapping[str, _Family] = {
    "bloom": _Family(
        lengths=_given_lengths,
        defaults=defaults.BLOOM,
        spellings=defaults.BLOOM_SPELLINGS,
        heads=_as_many_pairs,
    ),
    "cohere": _Family(defaults=defaults.COHERE),
    "cohere2": _Family(_gemma3_windows, defaults=defaults.COHERE2),
    "deepseek_v2": _Family(heads=_latent_heads, defaults=defaults.DEEPSEEK_V2, mixture=True),
    "deepseek_v3": _Family(heads=_latent_heads, defaults=defaults.DEEPSEEK_V3, mixture=True),
    "dots1": _Family(_dots1_windows, defaults=defaults_2025.DOTS1, mixture=True),
    "ernie4_5": _Family(defaults=defaults_2025.ERNIE4_5),
    "ernie4_5_moe": _Family(
        defaults=defaults_2025.ERNIE4_5_MOE, spellings=defaults_2025.ERNIE4_5_MOE_SPELLINGS, mixture=True
    ),
    "exaone4": _Family(_exaone4_windows, defaults=defaults_2025.EXAONE4),
    "falcon": _Family(defaults=defaults.FALCON, spellings=defaults.FALCON_SPELLINGS, heads=_falcon_heads),
    "gemma": _Family(defaults=defaults.GEMMA),
    "gemma2": _Family(_gemma2_windows, defaults=defaults.GEMMA2),
    "gemma3": _Family(_gemma3_windows, _given_lengths, defaults=defaults.GEMMA3),
    "gemma3_text": _Family(_gemma3_windows, _given_lengths, defaults=defaults.GEMMA3),
    "gemma3n": _Family(_gemma3_windows, _given_lengths, defaults=defaults.GEMMA3N, shares_kv=True),
    "gemma3n_text": _Family(_gemma3_windows, _given_lengths, defaults=defaults.GEMMA3N, shares_kv=True),
    "glm": _Family(defaults=defaults_2025.GLM),
    "glm4": _Family(defaults=defaults_2025.GLM),
    "glm4_moe": _Family(defaults=defaults.GLM4_MOE, mixture=True),
    "glm4_moe_lite": _Family(heads=_latent_heads, defaults=defaults_2025.GLM4_MOE_LITE, mixture=True),
    "gpt2": _Family(
        lengths=_given_lengths,
        defaults=defaults.GPT2,
        spellings=defaults.GPT2_SPELLINGS,
        heads=_as_many_pairs,
    ),
    "gpt_oss": _Family(_gemma2_windows, defaults=defaults.GPT_OSS, spellings=defaults.GPT_OSS_SPELLINGS, mixture=True),
    "granite": _Family(defaults=defaults.GRANITE),
    "granitemoe": _Family(defaults=defaults.GRANITE_MOE, mixture=True),
    "hunyuan_v1_dense": _Family(defaults=defaults_2025.HUNYUAN),
    "hunyuan_v1_moe": _Family(
        defaults=defaults_2025.HUNYUAN_MOE, spellings=defaults_2025.HUNYUAN_MOE_SPELLINGS, mixture=True
    ),
    "kimi_k2": _Family(heads=_latent_heads, defaults=defaults.DEEPSEEK_V3, mixture=True),
    "llama": _Family(),
    "llama4": _Family(_llama4_chunks, defaults=defaults.LLAMA4, chunked=True, mixture=True),
    "llama4_text": _Family(_llama4_chunks, defaults=defaults.LLAMA4, chunked=True, mixture=True),
    "minimax_m2": _Family(
        defaults=defaults_2025.MINIMAX_M2, spellings=defaults_2025.MINIMAX_M2_SPELLINGS, mixture=True
    ),
    "mistral": _Family(_uniform_windows, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": _Family(_uniform_windows, defaults=defaults.MIXTRAL, mixture=True),
    "mpt": _Family(
        lengths=_given_lengths,
        defaults=defaults.MPT,
        spellings=defaults.MPT_SPELLINGS,
        heads=_as_many_pairs,
    ),
    "olmo2": _Family(defaults=defaults.OLMO2),
    "olmo3": _Family(_gemma3_windows, _given_lengths, defaults=defaults_2025.OLMO3),
    "olmoe": _Family(defaults=defaults.OLMOE, mixture=True),
    "opt": _Family(
        lengths=_given_lengths,
        defaults=defaults.OPT,
        heads=_as_many_pairs,
    ),
    "phi": _Family(defaults=defaults.PHI),
    "phi3": _Family(_uniform_windows, defaults=defaults.PHI3),
    "phimoe": _Family(_uniform_windows, defaults=defaults.PHIMOE, mixture=True),
    "qwen2": _Family(_qwen_windows, defaults=defaults.QWEN2),
    "qwen2_moe": _Family(_qwen2_moe_windows, defaults=defaults.QWEN2_MOE, mixture=True),
    "qwen3": _Family(_qwen_windows, defaults={**defaults.QWEN2, "head_dim": 128}),
    "qwen3_moe": _Family(_qwen3_moe_windows, defaults=defaults.QWEN3_MOE, mixture=True),
    "seed_oss": _Family(defaults=defaults_2025.SEED_OSS),
    "smollm3": _Family(_smollm3_windows, defaults=defaults_2025.SMOLLM3),
    "stablelm": _Family(defaults=defaults.STABLELM),
}
MODEL_TYPES = tuple(_FAMILIES)
"""Every `model_type` that runs."""
UNEVEN_STAGES = frozenset(kind for kind, family in _FAMILIES.items() if family.shares_kv)
"""Those whose stages of a pipeline differ much in memory: the first has the tables of all layers' own inputs."""
