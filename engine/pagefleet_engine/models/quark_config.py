"""FP8 as AMD Quark exports it (`quant_method` quark): one form for all linear layers, and others for those whose names
fit a pattern.

Source: the config.json of exported models, and Quark's documentation of it.
"""

from __future__ import annotations

import fnmatch

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.layers.quantization_scheme import (
    InputScales,
    Quantization,
    QuantizationScheme,
    Rule,
    WeightScales,
)
from pagefleet_engine.models.quantization_fields import check_expression, own_name, refusal

_EVERY_LAYER = ("Linear",)
_FP8 = "fp8_e4m3"


def read_quark(section: ConfigFields) -> Quantization:
    """Scales of keys and values are those of the outputs of layers that `kv_cache_group` names.

    Raises:
        ModelLoadError: it is not FP8, or more than weights, inputs, keys and values is quantized.
    """
    export, layers = section.section("export"), section.section("layer_quant_config")
    stored = export.text("weight_format", "real_quantized")
    if stored != "real_quantized":
        raise refusal(section, f"weight_format of Quark is {stored}")
    if section.present("softmax_quant_spec") or section.section("layer_type_quant_config").section_names():
        raise refusal(section, "softmax_quant_spec or layer_type_quant_config of Quark has a value")
    if any(one.text("name", "") == "rotation" for one in section.objects("algo_config")):
        raise refusal(section, "algo_config of Quark has a rotation")
    cached = export.texts("kv_cache_group")
    rules, left = [], [_pattern(section, "exclude", name) for name in section.texts("exclude")]
    for name in layers.section_names():
        layer, pattern = layers.section(name), _pattern(section, "layer_quant_config", name)
        _check_outputs(layer, may_have=name in cached or (bool(cached) and name.endswith("q_proj")))
        if layer.present("weight"):
            rules.append(Rule((pattern,), _scheme(layer)))
        else:
            left.append(pattern)
    everywhere = section.section("global_quant_config")
    _check_outputs(everywhere, may_have=False)
    rules.append(Rule(_EVERY_LAYER, _scheme(everywhere)))
    return Quantization(rules=tuple(rules), ignored=tuple(left), kv_scales=bool(cached))


def _scheme(group: ConfigFields) -> QuantizationScheme:
    weights = group.section("weight")
    _check_number(weights)
    if weights.flag("is_dynamic", False):
        raise refusal(weights, "weights are quantized at run time")
    scales: WeightScales
    match weights.text("qscheme", ""), weights.count("ch_axis", 0, low=-1):
        case "per_tensor", _:
            scales = "tensor"
        case "per_channel", 0:
            scales = "channel"
        case qscheme, axis:
            raise refusal(weights, f"weights of Quark are {qscheme or 'scaled as nothing says'} (ch_axis {axis})")
    return QuantizationScheme(number="fp8", weight_scales=scales, input_scales=_input_scales(group))


def _input_scales(group: ConfigFields) -> InputScales:
    if not group.present("input_tensors"):
        return "none"
    inputs = group.section("input_tensors")
    _check_number(inputs)
    match inputs.text("qscheme", ""), inputs.flag("is_dynamic", False):
        case "per_tensor", False:
            return "tensor"
        case (("per_tensor" | "per_channel"), True):
            # One scale for a whole step would let requests change each other's numbers.
            return "token"
        case qscheme, is_dynamic:
            said = f"{'dynamic' if is_dynamic else 'static'} inputs of Quark are {qscheme or 'scaled as nothing says'}"
            raise refusal(inputs, said)


def _check_number(numbers: ConfigFields) -> None:
    if (dtype := numbers.text("dtype", "")) != _FP8:
        raise refusal(numbers, f"dtype of Quark is {dtype or 'not given'}")


def _check_outputs(group: ConfigFields, *, may_have: bool) -> None:
    """What is not kept must not be rounded; what is kept is, in fp8 with a fixed scale."""
    if group.present("bias"):
        raise refusal(group, "biases are quantized")
    if not group.present("output_tensors"):
        return
    outputs = group.section("output_tensors")
    said = (outputs.text("dtype", ""), outputs.text("qscheme", ""), outputs.flag("is_dynamic", False))
    if not may_have:
        raise refusal(group, "outputs are quantized (output_tensors)")
    if said != (_FP8, "per_tensor", False):
        raise refusal(outputs, "the KV cache is scaled otherwise than in fp8 with one fixed scale per tensor")


def _pattern(section: ConfigFields, field: str, name: str) -> str:
    """A name, a pattern with `*`, or `re:` and a regular expression."""
    if name.startswith("re:"):
        check_expression(name.removeprefix("re:"), name, section, field)
        return name
    return f"re:{fnmatch.translate(own_name(name))}" if "*" in name else own_name(name)
