"""Gemma 3 (arXiv 2503.19786), its text model: Gemma 2 with normalised heads instead of capped scores, five layers with
a window to each without, and a slower rotation for those without.

A checkpoint of text and images (`model_type` gemma3) is served as a text model; its vision weights are not loaded.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import head_size, named_windows, read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.rope_config import rope_from

# transformers.Gemma3TextConfig
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
}
_KINDS = ("full_attention", "sliding_attention")

_log = logging.getLogger(__name__)


def read(fields: ConfigFields) -> ModelArch:
    """Of a configuration for text and images, the part about text."""
    if fields.text("model_type", "") == "gemma3_text":
        return _read_text(fields)
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    arch = _read_text(fields.section("text_config", inherited=shared))
    ends = (*fields.token_ids("eos_token_id"), *arch.eos_token_ids)
    return replace(arch, model_type="gemma3", eos_token_ids=tuple(dict.fromkeys(ends)))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    if arch.model_type == "gemma3":
        _log.info("gemma3: only the text model is loaded, requests cannot contain images")
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="heads",
        layer_norms="around",
        norm_unit_offset=True,
        embedding_scale=arch.hidden_size**0.5,
    )
    return DecoderModel(arch, traits, placement)


def _read_text(fields: ConfigFields) -> ModelArch:
    """The last of every `sliding_window_pattern` layers sees the whole context unless `layer_types` says otherwise."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.must_be_unset("use_bidirectional_attention")
    fields.must_be_unset("attn_logit_softcapping")
    arch = read_shared(fields, activation_field="hidden_activation", ropes=_ropes(fields))
    kinds = fields.layer_types(arch.num_layers)
    if kinds is None:
        period = fields.count("sliding_window_pattern")
        kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(arch.num_layers)]
    return replace(
        arch,
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
        windows=named_windows(fields, kinds),
        layer_ropes=tuple(_KINDS.index(kind) for kind in kinds),
        mlp_bias=False,
    )


def _ropes(fields: ConfigFields) -> tuple[RopeParameters, ...]:
    """Of the layers that see the whole context, and of those with a window.

    Both in `rope_parameters`, or as in older files: `rope_theta` and `rope_scaling` for the former,
    `rope_local_base_freq` for the latter.
    """
    head_dim, scaling = head_size(fields), fields.section("rope_parameters")
    if fields.present("rope_parameters") and not set(_KINDS) & set(scaling.section_names()):
        raise ModelLoadError(f"{scaling.source} must hold an object for each of {', '.join(_KINDS)}: repair the file")
    full = scaling.section("full_attention") if fields.present("rope_parameters") else fields.section("rope_scaling")
    sliding = scaling.section("sliding_attention")
    full_theta = full.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    sliding_theta = sliding.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    return (rope_from(full, fields, head_dim, full_theta), rope_from(sliding, fields, head_dim, sliding_theta))
