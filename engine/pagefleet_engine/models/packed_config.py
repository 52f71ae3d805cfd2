"""Matrices in numbers of a few bits, from the sections of AWQ, GPTQ and compressed-tensors' `pack-quantized`.

Sources: AutoAWQ's and GPTQModel's `quantization_config`, and the meaning that transformers gives their fields.
"""

from __future__ import annotations

import re

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.gguf.blocks import BY_NAME
from pagefleet_engine.layers.quantization_scheme import BlockScheme, PackedScheme, Packing, Quantization, Rule
from pagefleet_engine.models.quantization_fields import check_expression, own_name, read_rounding, refusal

PACK_QUANTIZED, INT_QUANTIZED = "pack-quantized", "int-quantized"
_PACKINGS: dict[str, Packing] = {PACK_QUANTIZED: "compressed-tensors", INT_QUANTIZED: "int-quantized"}
_GPTQ_BITS = (2, 3, 4, 8)
EVERY_LAYER = ("Linear",)
HEAD = "lm_head"


def is_in_groups(group: ConfigFields) -> bool:
    """Whether one of compressed-tensors' config_groups of `int-quantized` has numbers of 4 bits, groups of inputs or
    zero points."""
    weights = group.section("weights")
    of_ints = weights.text("type", "int") == "int"
    return of_ints and (
        weights.count("num_bits", 8) == 4
        or weights.text("strategy", "tensor") == "group"
        or not weights.flag("symmetric", True)
    )


def read_packed_group(group: ConfigFields, used: str) -> PackedScheme:
    """One of compressed-tensors' config_groups, in the format `used`.

    Raises:
        ModelLoadError: it is not run.
    """
    weights, inputs = group.section("weights"), read_rounding(group)
    if inputs is not None and (inputs.scales != "token" or inputs.zero_points):
        raise refusal(group, f"weights of few bits or with zero points beside {inputs.describe()}")
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8)
    if kind != "int" or bits not in (4, 8):
        raise refusal(weights, f"{kind} of {bits} bits in {used}")
    if weights.flag("dynamic", False):
        raise refusal(weights, "weights are quantized at run time")
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("group", "channel"):
        raise refusal(weights, f"strategy {strategy} in {used}")
    size = weights.count("group_size") if strategy == "group" else None
    order = weights.text("actorder", "")
    if order not in ("", "group", "dynamic", "weight", "static"):
        raise refusal(weights, f"actorder is {order}")
    return PackedScheme(
        packing=_PACKINGS[used],
        bits=bits,
        group_size=size,
        zero_points=not weights.flag("symmetric", True),
        # The others write weights back in their own order.
        act_order=order in ("group", "dynamic") and size is not None,
        inputs=inputs,
    )


def read_awq(section: ConfigFields) -> Quantization:
    """`quant_method` awq.

    Raises:
        ModelLoadError: it is not run.
    """
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        raise refusal(section, f"version of AWQ is {version}")
    parts = [own_name(part) for part in section.texts("modules_to_not_convert")]
    return Quantization(rules=(Rule(EVERY_LAYER, awq_scheme(section)),), ignored=(HEAD, *map(anywhere, parts)))


def awq_scheme(section: ConfigFields) -> PackedScheme:
    """Of AWQ's words, which have zero points whether or not these (`zero_point`, `sym`) are all the same.

    Raises:
        ModelLoadError: it is not run.
    """
    bits = section.count("bits", 4)
    if bits != 4:
        raise refusal(section, f"AWQ of {bits} bits")
    return PackedScheme(packing="awq", bits=bits, group_size=_group_size(section), zero_points=True)


def read_gptq(section: ConfigFields) -> Quantization:
    """`quant_method` gptq.

    Raises:
        ModelLoadError: it is not run.
    """
    form = section.text("checkpoint_format", "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise refusal(section, f"checkpoint_format of GPTQ is {form}")
    if section.flag("lm_head", False):
        raise refusal(section, "GPTQ of the head (lm_head is true)")
    if section.flag("is_marlin_format", False):
        raise refusal(section, "GPTQ in the layout of Marlin (is_marlin_format is true)")
    packing: Packing = "gptq_v2" if form == "gptq_v2" else "gptq"
    rules, ignored = [], [HEAD, *map(anywhere, map(own_name, section.texts("modules_to_not_convert")))]
    dynamic = section.section("dynamic")
    usual = {
        "bits": section.count("bits"),
        "group_size": section.count("group_size", 128, low=-1),
        "sym": section.flag("sym", True),
        "desc_act": section.flag("desc_act", False),
    }
    for name in dynamic.section_names():
        sign, expression = (name[:2], name[2:]) if name[:2] in ("+:", "-:") else ("+:", name)
        check_expression(expression, name, section, "dynamic")
        pattern = f"re:{own_name(expression)}"
        if sign == "-:":
            ignored.append(pattern)
        else:
            rules.append(Rule((pattern,), gptq_scheme(dynamic.section(name).with_defaults(usual), packing)))
    within = section.nested_texts("modules_in_block_to_quantize")
    rules.append(Rule(tuple(map(anywhere, within)) or EVERY_LAYER, gptq_scheme(section, packing)))
    return Quantization(rules=tuple(rules), ignored=tuple(ignored))


def read_gguf_types(section: ConfigFields) -> Quantization:
    """`quant_method` gguf, as `gguf.config` writes it: the layers of each type."""
    types = section.section("types")
    rules = tuple(Rule(types.texts(kind), BlockScheme((kind,))) for kind in BY_NAME if types.present(kind))
    return Quantization(rules=rules)


def gptq_scheme(section: ConfigFields, packing: Packing) -> PackedScheme:
    """Of GPTQ's words.

    Raises:
        ModelLoadError: it is not run.
    """
    bits = section.count("bits")
    if bits not in _GPTQ_BITS:
        raise refusal(section, f"GPTQ of {bits} bits")
    size = _group_size(section)
    return PackedScheme(
        packing=packing,
        bits=bits,
        group_size=size,
        zero_points=not section.flag("sym", True),
        act_order=section.flag("desc_act", False) and size is not None,
    )


def _group_size(section: ConfigFields) -> int | None:
    size = section.count("group_size", 128, low=-1)
    if size == 0:
        raise refusal(section, "group_size is 0")
    return None if size == -1 else size


def anywhere(part: str) -> str:
    """A pattern of the layers that have these words of a name, and of those within."""
    return rf"re:(.*\.)?{re.escape(part.strip('.'))}(\.|$)"
