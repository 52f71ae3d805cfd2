"""Gemma 3 (arXiv 2503.19786), its text model: Gemma 2 with normalised heads instead of capped scores, five layers with
a window to each without, and a slower rotation for those without.

A checkpoint of text and images (`model_type` gemma3) is served as a text model; its vision weights are not loaded.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.rope_config import rope_from

_KINDS = ("full_attention", "sliding_attention")

_log = logging.getLogger(__name__)


def read(shape: ModelShape) -> ModelArch:
    """The last of every `sliding_window_pattern` layers sees the whole context unless `layer_types` says otherwise.

    Of a configuration for text and images the part about text counts, and both name ends of a text.
    """
    fields = shape.fields
    fields.must_be_unset("use_bidirectional_attention")
    fields.must_be_unset("attn_logit_softcapping")
    return replace(
        read_shared(shape, activation_field="hidden_activation", ropes=ropes_by_kind(shape)),
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        final_softcap=fields.optional_number("final_logit_softcapping"),
        layer_ropes=tuple(0 if window is None else 1 for window in shape.windows),
        mlp_bias=False,
        eos_token_ids=ends_of_text(shape),
    )


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


def ends_of_text(shape: ModelShape) -> tuple[int, ...]:
    """As the whole configuration names them and its part about text."""
    ends = (*shape.outer.token_ids("eos_token_id"), *shape.fields.token_ids("eos_token_id"))
    return tuple(dict.fromkeys(ends))


def ropes_by_kind(
    shape: ModelShape, *, theta: float = 1_000_000.0, local_theta: float = 10_000.0
) -> tuple[RopeParameters, ...]:
    """Of the layers that see the whole context, and of those with a window; bases are theirs where a file has none.

    Both in `rope_parameters`, or as in older files: `rope_theta` and `rope_scaling` for the former,
    `rope_local_base_freq` for the latter.
    """
    fields, head_dim = shape.fields, shape.head_dim
    scaling = fields.section("rope_parameters")
    if fields.present("rope_parameters") and not set(_KINDS) & set(scaling.section_names()):
        raise ModelLoadError(f"{scaling.source} must hold an object for each of {', '.join(_KINDS)}: repair the file")
    full = scaling.section("full_attention") if fields.present("rope_parameters") else fields.section("rope_scaling")
    sliding = scaling.section("sliding_attention")
    full_theta = full.number("rope_theta", fields.number("rope_theta", theta))
    sliding_theta = sliding.number("rope_theta", fields.number("rope_local_base_freq", local_theta))
    return (rope_from(full, fields, head_dim, full_theta), rope_from(sliding, fields, head_dim, sliding_theta))
