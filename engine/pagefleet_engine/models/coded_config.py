"""Matrices in codes of 4 bits, from the sections of compressed-tensors and bitsandbytes.

Sources: compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`; transformers' `BitsAndBytesConfig`.
"""

from __future__ import annotations

from typing import Literal

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import CodedScheme, Quantization, QuantizationScheme, Rule, Scheme
from pagefleet_engine.models.packed_config import anywhere
from pagefleet_engine.models.quantization_fields import own_name, refusal

NVFP4_GROUP, _MXFP4_GROUP = 16, 32
NVFP4 = CodedScheme(
    table="e2m1",
    scales="e4m3",
    group_size=NVFP4_GROUP,
    spelling="nvfp4-pack-quantized",
    factor_name="weight_global_scale",
    factor_divides=True,
)
CODED = {
    NVFP4.spelling: NVFP4,
    "mxfp4-pack-quantized": CodedScheme(
        table="e2m1", scales="e8m0", group_size=_MXFP4_GROUP, spelling="mxfp4-pack-quantized"
    ),
}
"""By the formats' names."""
BITSANDBYTES_GROUP = 64


def read_coded_group(group: ConfigFields, used: str) -> CodedScheme:
    """One of compressed-tensors' config_groups, in a format of `CODED`. Inputs that the file quantizes to 4 bits are
    taken as they are: no device that is run multiplies such numbers.

    Raises:
        ModelLoadError: it is not run.
    """
    weights, scheme = group.section("weights"), CODED[used]
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8)
    if (kind, bits) != ("float", 4) or weights.count("group_size", scheme.group_size) != scheme.group_size:
        raise refusal(weights, f"{kind} of {bits} bits in groups of {weights.count('group_size', 0, low=-1)} in {used}")
    if not weights.flag("symmetric", True):
        raise refusal(weights, "numbers have a zero point (symmetric is false)")
    inputs = group.section("input_activations")
    if group.present("input_activations") and inputs.count("num_bits", 8) != 4:
        raise refusal(inputs, f"inputs of {inputs.count('num_bits', 8)} bits in {used}")
    return scheme


def read_bitsandbytes(section: ConfigFields) -> Quantization:
    """`quant_method` bitsandbytes, of weights that were saved quantized: those of linear layers, which experts in one
    tensor are not.

    Raises:
        ModelLoadError: it is not run.
    """
    scheme: Scheme
    if section.flag("load_in_8bit", False) and section.flag("load_in_4bit", False):
        raise ModelLoadError(
            f"{section.source}: load_in_4bit and load_in_8bit are both true: leave true the one that the weights are in"
        )
    if section.flag("load_in_8bit", False):
        # Outlying inputs stay floats there; here all do.
        scheme = QuantizationScheme(number="int8", weight_scales="channel", input_scales="none")
    else:
        said = section.text("bnb_4bit_quant_type", "fp4")
        if said not in ("nf4", "fp4"):
            raise refusal(section, f"bnb_4bit_quant_type is {said}")
        table: Literal["nf4", "fp4"] = "nf4" if said == "nf4" else "fp4"
        scheme = CodedScheme(
            table=table,
            scales="float32",
            group_size=BITSANDBYTES_GROUP,
            spelling="bitsandbytes",
            codes_name="weight",
            scales_name=f"weight_absmax_{table}",
            first_is_upper=True,
        )
    left = map(anywhere, map(own_name, section.texts("llm_int8_skip_modules")))
    return Quantization(rules=(Rule(("Linear",), scheme),), ignored=("lm_head", *left), leaves_stacks=True)
