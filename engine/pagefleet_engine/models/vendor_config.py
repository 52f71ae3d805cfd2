"""FP8 and NVFP4 as FBGEMM's and ModelOpt's files spell it.

Sources: transformers' `FbgemmFp8Config`; ModelOpt's hf_quant_config.json, which newer files repeat in config.json.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.layers.quantization_scheme import Quantization, QuantizationScheme, Rule, Scheme
from pagefleet_engine.models.coded_config import NVFP4, NVFP4_GROUP
from pagefleet_engine.models.quantization_fields import layer_patterns, own_name, refusal

_EVERY_LAYER = ("Linear",)
_HEAD = "lm_head"


def read_fbgemm(section: ConfigFields) -> Quantization:
    """`quant_method` fbgemm_fp8: inputs of a token have a scale of their own, up to a bound."""
    scheme = QuantizationScheme(
        number="fp8",
        weight_scales="channel",
        input_scales="token",
        input_bound=section.number("activation_scale_ub", 1200.0),
    )
    left = layer_patterns(section, "modules_to_not_convert")
    return Quantization(rules=(Rule(_EVERY_LAYER, scheme),), ignored=(_HEAD, *left))


def read_modelopt(section: ConfigFields) -> Quantization:
    """`quant_method` modelopt.

    Raises:
        ModelLoadError: it is not run.
    """
    if section.present("quantization"):  # as in hf_quant_config.json
        section = section.section("quantization")
    scheme: Scheme
    match section.text("quant_algo", "").upper():
        case "FP8":
            scheme = QuantizationScheme(number="fp8", weight_scales="tensor", input_scales="tensor")
        case "FP8_PER_CHANNEL_PER_TOKEN":
            scheme = QuantizationScheme(number="fp8", weight_scales="channel", input_scales="token")
        case "NVFP4":
            if section.count("group_size", NVFP4_GROUP) != NVFP4_GROUP:
                raise refusal(section, f"group_size of NVFP4 is {section.count('group_size')}")
            scheme = replace(
                NVFP4,
                codes_name="weight",
                factor_name="weight_scale_2",
                factor_divides=False,
                passed_over="input_scale",
                spelling="modelopt",
            )
        case algorithm:
            raise refusal(section, f"quant_algo of ModelOpt is {algorithm or 'not given'}")
    cache = section.text("kv_cache_quant_algo", "").upper()
    if cache not in ("", "NONE", "FP8"):
        raise refusal(section, f"kv_cache_quant_algo of ModelOpt is {cache}")
    given = section.texts("exclude_modules") or section.texts("ignore")
    left = [f"re:{fnmatch.translate(own_name(name))}" if "*" in name else own_name(name) for name in given]
    return Quantization(rules=(Rule(_EVERY_LAYER, scheme),), ignored=(_HEAD, *left), kv_scales=cache == "FP8")
