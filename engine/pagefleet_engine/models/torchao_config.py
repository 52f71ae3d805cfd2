"""torchao's section of config.json (`quant_method` torchao): one of its configurations for all linear layers, or
several by name (`FqnToConfig`), each an object with `_type`, `_version` and `_data`.

Embeddings and heads that are quantized become floats as they are read (`loader.torchao`): nothing is said of them here.
Sources: torchao's `config_to_dict` and its configurations, transformers' `TorchAoConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pagefleet_protocol.model_config.fields import ConfigFields
from pagefleet_protocol.model_config.quantized import torchao_by_name, torchao_default

from pagefleet_engine.layers.quantization_scheme import (
    InputScales,
    PackedScheme,
    Quantization,
    QuantizationScheme,
    RoundedNumber,
    Rounding,
    Rule,
    Scheme,
    WeightScales,
)
from pagefleet_engine.models.packed_config import EVERY_LAYER, HEAD, anywhere
from pagefleet_engine.models.quantization_fields import check_expression, own_name, refusal

_SUFFIX = re.compile(r"\\?\.weight$")
_PLAIN_NAME = re.compile(r"[\w.-]+")
_INT4_GROUP = 128
"""Of FP8 inputs, whose configuration has no other."""


def read_torchao(section: ConfigFields) -> Quantization:
    """`quant_method` torchao.

    Raises:
        ModelLoadError: it is not run.
        ModelConfigError: it is known, and not run.
    """
    default = torchao_default(section)
    left = [HEAD]
    for name in section.texts("modules_to_not_convert"):
        left.append(anywhere(own_name(name)))
        if not _PLAIN_NAME.fullmatch(name):
            check_expression(name, name, section, "modules_to_not_convert")
            left.append(rf"re:(?:{own_name(name)})(\.|$)")
    by_name = torchao_by_name(default)
    if by_name is None:
        return Quantization(rules=(Rule(EVERY_LAYER, _scheme(default)),), ignored=tuple(left), leaves_stacks=True)
    named, matched, rest = list[Rule](), list[Rule](), list[Rule]()
    for name in by_name.names():
        pattern = EVERY_LAYER[0] if name == "_default" else _pattern(by_name, name)
        if not by_name.present(name):
            if name != "_default":
                left.append(pattern)
        elif name == "_default":
            rest.append(Rule((pattern,), _scheme(by_name.section(name))))
        else:
            (matched if name.startswith("re:") else named).append(Rule((pattern,), _scheme(by_name.section(name))))
    rules = (*named, *matched, *rest)
    if not rules:
        raise refusal(section, "quant_type of torchao quantizes nothing")
    return Quantization(rules=rules, ignored=tuple(left), leaves_stacks=True)


def _pattern(fields: ConfigFields, name: str) -> str:
    """Of a layer's or its weight's name, or `re:` and an expression that is all of one."""
    if not name.startswith("re:"):
        return rf"re:{re.escape(own_name(name).removesuffix('.weight'))}$"
    expression = name.removeprefix("re:")
    check_expression(expression, name, fields, "fqn_to_config")
    return rf"re:(?:{_SUFFIX.sub('', own_name(expression))})$"


def _scheme(config: ConfigFields) -> Scheme:
    return _READERS[config.text("_type", "")](config.section("_data"))


def _fp8(data: ConfigFields) -> Scheme:
    _check_fp8(data, "weight_dtype")
    return _in_bytes("fp8", _granularity(data, "granularity"), "none")


def _int8(data: ConfigFields) -> Scheme:
    group = _granularity(data, "granularity")
    if group in ("PerRow", "PerTensor"):
        return _in_bytes("int8", group, "none")
    return PackedScheme(packing="int-quantized", bits=8, group_size=int(group), zero_points=False)


def _int8_inputs(data: ConfigFields) -> Scheme:
    zeros = _choice(data, "act_mapping_type", "SYMMETRIC") == "ASYMMETRIC"
    return _in_bytes("int8", _of_weights(data, "PerRow"), "token", zeros=zeros)


def _in_bytes(
    number: RoundedNumber,
    weights: str,
    inputs: InputScales,
    *,
    zeros: bool = False,
    bound: float | None = None,
) -> QuantizationScheme:
    scales: WeightScales = "channel"
    block: tuple[int, int] | None = None
    if weights == "PerTensor":
        scales = "tensor"
    elif weights != "PerRow":
        scales, block = "block", (1, int(weights))
    return QuantizationScheme(
        number=number,
        weight_scales=scales,
        input_scales=inputs,
        block=block,
        input_zero_points=zeros,
        input_bound=bound,
    )


def _fp8_inputs(data: ConfigFields) -> QuantizationScheme:
    for name in ("weight_dtype", "activation_dtype"):
        _check_fp8(data, name)
    if _choice(data, "packing_format", "PLAIN") != "PLAIN":
        raise refusal(data, f"packing_format of torchao is {_choice(data, 'packing_format', '')}")
    if data.present("activation_value_lb"):
        raise refusal(data, "inputs have a least scale (activation_value_lb)")
    bound = data.optional_number("activation_value_ub")
    return _in_bytes("fp8", _of_weights(data, "PerTensor"), "token", bound=bound)


def _int4(group_size: int, inputs: Rounding | None = None) -> PackedScheme:
    return PackedScheme(packing="torchao", bits=4, group_size=group_size, zero_points=True, inputs=inputs)


def _intx(data: ConfigFields, granularity: str, mapping: str) -> PackedScheme:
    """Inputs that it rounds to 8 bits around a zero point are taken as they are: that is nearer to the model."""
    dtype = _choice(data, "weight_dtype", "int8")
    if not re.fullmatch(r"int[1-8]", dtype):
        raise refusal(data, f"weight_dtype of torchao is {dtype[:80]}")
    if (packing := _choice(data, "intx_packing_format", "UNPACKED_TO_INT8")) != "UNPACKED_TO_INT8":
        raise refusal(data, f"intx_packing_format of torchao is {packing[:80]}")
    group = _granularity(data, granularity)
    zeros = _choice(data, mapping, "SYMMETRIC")
    if zeros not in ("SYMMETRIC", "ASYMMETRIC") or group == "PerTensor":
        raise refusal(data, f"{mapping} of torchao is {zeros[:80]}, {granularity} {group}")
    return PackedScheme(
        packing="int-quantized",
        bits=4 if dtype <= "int4" else 8,
        group_size=None if group == "PerRow" else int(group),
        zero_points=zeros == "ASYMMETRIC",
    )


def _of_weights(data: ConfigFields, usual: str) -> str:
    """The granularity of weights, beside that of inputs, which have a scale for each token in any case: one for a whole
    step would let requests change each other's numbers."""
    each = [_granularity_of(one) for one in data.objects("granularity")] or [usual]
    if len(each) > 2 or not set(each) <= {"PerRow", "PerTensor"}:
        raise refusal(data, f"granularities of torchao are {', '.join(each)[:80]}")
    return each[-1]


def _granularity(data: ConfigFields, name: str) -> str:
    """PerRow, PerTensor, or the size of groups."""
    return _granularity_of(data.section(name)) if data.present(name) else "PerRow"


def _granularity_of(said: ConfigFields) -> str:
    inside = said.section("_data")
    match said.text("_type", ""):
        case "PerRow" if inside.count("dim", -1, low=-1) in (-1, 1):
            return "PerRow"
        case "PerAxis" if inside.count("axis", 0, low=-1) == 0:
            return "PerRow"
        case "PerTensor":
            return "PerTensor"
        case "PerGroup":
            return str(inside.count("group_size"))
        case kind:
            raise refusal(said, f"granularity of torchao is {kind[:80] or 'not given'}")


def _choice(data: ConfigFields, name: str, usual: str) -> str:
    """What an enumeration or a type is spelled as: in an object, or by itself."""
    return data.section(name).text("_data", usual) if name in data.section_names() else data.text(name, usual)


def _check_fp8(data: ConfigFields, name: str) -> None:
    if (dtype := _choice(data, name, "float8_e4m3fn")) != "float8_e4m3fn":
        raise refusal(data, f"{name} of torchao is {dtype[:80]}")


_READERS: dict[str, Callable[[ConfigFields], Scheme]] = {
    "Float8WeightOnlyConfig": _fp8,
    "Float8DynamicActivationFloat8WeightConfig": _fp8_inputs,
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_inputs,
    "Int4WeightOnlyConfig": lambda data: _int4(data.count("group_size", _INT4_GROUP)),
    "Float8DynamicActivationInt4WeightConfig": lambda _: _int4(_INT4_GROUP, Rounding(number="fp8", scales="token")),
    "IntxWeightOnlyConfig": lambda data: _intx(data, "granularity", "mapping_type"),
    "Int8DynamicActivationIntxWeightConfig": lambda data: _intx(data, "weight_granularity", "weight_mapping_type"),
}
