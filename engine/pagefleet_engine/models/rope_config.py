"""Rotary parameters in both spellings of Hugging Face configurations: `rope_theta` with `rope_scaling`, and the later
`rope_parameters` that holds both."""

from __future__ import annotations

import math

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.models.config_fields import ConfigFields


def read_rope(fields: ConfigFields, max_position: int) -> tuple[RopeParameters, int]:
    """The rotary parameters and the context length that they are meant for."""
    scaling = fields.section("rope_parameters" if fields.present("rope_parameters") else "rope_scaling")
    if nested := scaling.section_names():
        raise ModelLoadError(
            f"{scaling.source}: separate values for {', '.join(nested)} are not supported; give one set for all layers"
        )
    for where in (scaling, fields):
        if where.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelLoadError(f"{where.source}: partial_rotary_factor must be 1; pagefleet rotates whole heads")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    match rope_type:
        case "default":
            return RopeParameters(theta=theta), max_position
        case "linear":
            factor = scaling.number("factor")
            return RopeParameters(rope_type="linear", theta=theta, factor=factor), int(max_position * factor)
        case "dynamic":
            factor = scaling.number("factor")
            rope = RopeParameters(rope_type="dynamic", theta=theta, factor=factor, original_max_position=max_position)
            return rope, int(max_position * factor)
        case "llama3":
            return _llama3(scaling, theta, max_position), max_position
        case "yarn":
            rope = _yarn(scaling, theta, max_position)
            return rope, max(max_position, int(rope.original_max_position * rope.factor))
        case _:
            raise ModelLoadError(
                f"{scaling.source}: rope_type is {rope_type}; pagefleet knows default, linear, dynamic, llama3, yarn"
            )


def _llama3(scaling: ConfigFields, theta: float, max_position: int) -> RopeParameters:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise ModelLoadError(f"{scaling.source}: low_freq_factor must be under high_freq_factor: repair the file")
    return RopeParameters(
        rope_type="llama3",
        theta=theta,
        factor=scaling.number("factor"),
        original_max_position=scaling.count("original_max_position_embeddings", max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: ConfigFields, theta: float, max_position: int) -> RopeParameters:
    original = scaling.count("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / original)
    return RopeParameters(
        rope_type="yarn",
        theta=theta,
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
