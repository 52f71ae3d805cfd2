"""Rotary parameters in both spellings of Hugging Face configurations: `rope_theta` with `rope_scaling`, and the later
`rope_parameters` that holds both."""

from __future__ import annotations

import math

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import RopeParameters


def read_rope(fields: ConfigFields, head_dim: int) -> RopeParameters:
    """The one set of rotary parameters that all layers share."""
    scaling = fields.section("rope_parameters" if fields.present("rope_parameters") else "rope_scaling")
    return rope_from(scaling, fields, head_dim, scaling.number("rope_theta", fields.number("rope_theta", 10_000.0)))


def rope_from(scaling: ConfigFields, fields: ConfigFields, head_dim: int, theta: float) -> RopeParameters:
    """Parameters of one `scaling` object within the configuration `fields`."""
    max_position = fields.count("max_position_embeddings")
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = RopeParameters(rotated_share=share).rotary_dim(head_dim)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{scaling.source}: partial_rotary_factor {share:g} rotates {rotary_dim} of the {head_dim} dimensions of a "
            "head; it must be an even number of them: repair the file"
        )
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    match rope_type:
        case "default":
            return RopeParameters(theta=theta, rotated_share=share)
        case "linear":
            factor = scaling.number("factor")
            return RopeParameters(rope_type="linear", theta=theta, rotated_share=share, factor=factor)
        case "dynamic":
            return _dynamic(scaling, theta, share, rotary_dim, max_position)
        case "llama3":
            return _llama3(scaling, theta, share, max_position)
        case "yarn":
            return _yarn(scaling, theta, share, max_position)
        case "longrope" | "su":  # its first name
            return _longrope(scaling, fields, theta, share, rotary_dim)
        case _:
            raise ModelLoadError(
                f"{scaling.source}: rope_type is {rope_type}; pagefleet knows default, linear, dynamic, llama3, yarn, "
                "longrope"
            )


def _dynamic(scaling: ConfigFields, theta: float, share: float, rotary_dim: int, max_position: int) -> RopeParameters:
    """By the length; or with Hunyuan's `alpha`, which no length changes."""
    if scaling.present("alpha"):
        stretch = scaling.number("alpha") ** (rotary_dim / (rotary_dim - 2))
        return RopeParameters(theta=theta * stretch, rotated_share=share)
    return RopeParameters(
        rope_type="dynamic",
        theta=theta,
        rotated_share=share,
        factor=scaling.number("factor"),
        original_max_position=max_position,
    )


def _llama3(scaling: ConfigFields, theta: float, share: float, max_position: int) -> RopeParameters:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        raise ModelLoadError(f"{scaling.source}: low_freq_factor must not be over high_freq_factor: repair the file")
    return RopeParameters(
        rope_type="llama3",
        theta=theta,
        rotated_share=share,
        factor=scaling.number("factor"),
        original_max_position=scaling.count("original_max_position_embeddings", max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: ConfigFields, theta: float, share: float, max_position: int) -> RopeParameters:
    original = scaling.count("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / original)
    return RopeParameters(
        rope_type="yarn",
        theta=theta,
        rotated_share=share,
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor),
        truncate=scaling.flag("truncate", True),
    )


def _attention_factor(scaling: ConfigFields, factor: float) -> float:
    """Given, or `0.1 ln(factor) + 1` (YaRN, equation 22), or a ratio of two such terms when both mscales are given."""
    if scaling.present("attention_factor"):
        return scaling.number("attention_factor")

    def term(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.present("mscale") and scaling.present("mscale_all_dim"):
        return term(scaling.number("mscale")) / term(scaling.number("mscale_all_dim"))
    return term(1.0)


def _longrope(
    scaling: ConfigFields, fields: ConfigFields, theta: float, share: float, rotary_dim: int
) -> RopeParameters:
    """The first context stands beside the scaling in Phi-3's files, inside it in others."""
    max_position = fields.count("max_position_embeddings")
    where = fields if fields.present("original_max_position_embeddings") else scaling
    original = where.count("original_max_position_embeddings", max_position, low=2)
    factor = scaling.number("factor", max_position / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeParameters(
        rope_type="longrope",
        theta=theta,
        rotated_share=share,
        original_max_position=original,
        attention_factor=scaling.number("short_mscale", scaling.number("attention_factor", grown)),
        long_attention_factor=scaling.optional_number("long_mscale"),
        short_factors=scaling.numbers("short_factor", rotary_dim // 2),
        long_factors=scaling.numbers("long_factor", rotary_dim // 2),
    )
