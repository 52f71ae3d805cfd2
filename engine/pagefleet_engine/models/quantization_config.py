"""How a checkpoint is quantized, from the `quantization_config` of its config.json.

Thirteen spellings are read: compressed-tensors (llm-compressor), `fp8` (DeepSeek, Qwen), `mxfp4` (gpt-oss), `awq`,
`gptq`, `auto-round`, `fbgemm_fp8`, `modelopt`, `quark`, `bitsandbytes`, `torchao`, `hqq`, and our own of GGUF. What
cannot be computed as it was meant is refused, with what can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pagefleet_kernels.mxfp4 import MXFP4_BLOCK
from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError
from pagefleet_protocol.model_config.quantized import AUTOROUND, quant_method

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import (
    InputScales,
    Number,
    Quantization,
    QuantizationScheme,
    RoundedNumber,
    Rule,
    Scheme,
    WeightScales,
    on_load,
)
from pagefleet_engine.models.autoround_config import read_autoround
from pagefleet_engine.models.coded_config import CODED, read_bitsandbytes, read_coded_group
from pagefleet_engine.models.hqq_config import read_hqq
from pagefleet_engine.models.packed_config import (
    INT_QUANTIZED,
    PACK_QUANTIZED,
    is_in_groups,
    read_awq,
    read_gguf_types,
    read_gptq,
    read_packed_group,
)
from pagefleet_engine.models.quantization_fields import layer_patterns, read_rounding, refusal
from pagefleet_engine.models.quark_config import read_quark
from pagefleet_engine.models.torchao_config import read_torchao
from pagefleet_engine.models.vendor_config import read_fbgemm, read_modelopt

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_EVERY_LAYER = ("Linear",)
# Of nothing but experts, whatever else a file lists as left out.
_MXFP4 = Quantization(
    rules=(
        Rule(
            (r"re:.*\.experts\.(gate_up|down)_proj$",),
            QuantizationScheme(number="mxfp4", weight_scales="block", input_scales="none", block=(1, MXFP4_BLOCK)),
        ),
    )
)


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """The rules in `quantization_config`; None where there are none.

    Raises:
        ModelLoadError: the weights are stored in a way that we do not run, or the section cannot be understood.
    """
    if not fields.present("quantization_config"):
        return None
    section = fields.section("quantization_config")
    readers: dict[str, Callable[[ConfigFields], Quantization]] = {
        "compressed-tensors": _read_compressed_tensors,
        "fp8": _read_fp8,
        "mxfp4": lambda _: _MXFP4,
        "awq": read_awq,
        "gptq": read_gptq,
        "gguf": read_gguf_types,
        "fbgemm_fp8": read_fbgemm,
        "modelopt": read_modelopt,
        "modelopt_fp4": read_modelopt,
        "quark": read_quark,
        "bitsandbytes": read_bitsandbytes,
        "torchao": read_torchao,
        "hqq": read_hqq,
        **dict.fromkeys(AUTOROUND, read_autoround),
    }
    try:
        method = quant_method(section)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
    if method not in readers:
        raise refusal(section, f"quant_method is {method or 'not given'}")
    found = readers[method](section)
    if not section.present("kv_cache_scheme"):  # of compressed-tensors, and in ModelOpt's newer files
        return found
    _check_kv_scheme(section.section("kv_cache_scheme"))
    return replace(found, kv_scales=True)


def settle_quantization(
    checkpoint: Quantization | None, requested: RoundedNumber | None, fp8_kv_cache: bool
) -> Quantization | None:
    """What is in force: the checkpoint's own quantization, or else the one that is `requested` on load.

    The checkpoint's scales of the KV cache count only where that is kept in fp8.

    Raises:
        ModelLoadError: both at once.
    """
    if requested is None:
        return None if checkpoint is None else replace(checkpoint, kv_scales=checkpoint.kv_scales and fp8_kv_cache)
    if checkpoint is not None:
        schemes = "; ".join(rule.scheme.describe() for rule in checkpoint.rules)
        raise ModelLoadError(
            f"--quantization {requested}: the checkpoint is quantized already ({schemes}); leave it out"
        )
    return on_load(requested)


def _read_compressed_tensors(section: ConfigFields) -> Quantization:
    if section.section("sparsity_config").text("format", "dense") != "dense":
        raise refusal(section, "the weights are sparse")
    default_format = section.text("format", "")
    rules = []
    groups = section.section("config_groups")
    for group in map(groups.section, groups.section_names()):
        used = group.text("format", default_format)
        if used not in (*_FORMATS, PACK_QUANTIZED, *CODED):
            raise refusal(group, f"format is {used or 'not given'}")
        if group.present("output_activations"):
            raise refusal(group, "outputs are quantized (output_activations)")
        scheme: Scheme
        if used in CODED:
            scheme = read_coded_group(group, used)
        elif used == PACK_QUANTIZED or (used == INT_QUANTIZED and is_in_groups(group)):
            scheme = read_packed_group(group, used)
        else:
            scheme = _read_scheme(group)
        rules.append(Rule(layer_patterns(group, "targets"), scheme))
    if not rules:
        raise refusal(section, "config_groups is empty")
    return Quantization(rules=tuple(rules), ignored=layer_patterns(section, "ignore"))


def _read_scheme(group: ConfigFields) -> QuantizationScheme:
    weights = group.section("weights")
    number = _read_number(weights)
    strategy = weights.text("strategy", "tensor")
    if weights.flag("dynamic", False):
        raise refusal(weights, "weights are quantized at run time")
    scales: WeightScales
    block: tuple[int, int] | None = None
    match strategy:
        case "tensor":
            scales = "tensor"
        case "channel":
            scales = "channel"
        case "block" if number == "fp8":
            scales, block = "block", weights.pair("block_structure")
        case _:
            raise refusal(weights, f"{number} with strategy {strategy}")
    inputs = read_rounding(group, block)
    if inputs is not None and inputs.number != number:
        raise refusal(group.section("input_activations"), "inputs and weights are of different types")
    return QuantizationScheme(
        number=number,
        weight_scales=scales,
        input_scales="none" if inputs is None else inputs.scales,
        block=block,
        input_zero_points=inputs is not None and inputs.zero_points,
    )


def _read_number(args: ConfigFields) -> Number:
    kind, bits = args.text("type", "int"), args.count("num_bits", 8)
    if not args.flag("symmetric", True):
        raise refusal(args, "numbers have a zero point (symmetric is false)")
    if bits != 8 or kind not in ("float", "int"):
        raise refusal(args, f"{kind} of {bits} bits")
    return "fp8" if kind == "float" else "int8"


def _check_kv_scheme(scheme: ConfigFields) -> None:
    if _read_number(scheme) != "fp8" or scheme.text("strategy", "tensor") != "tensor" or scheme.flag("dynamic", False):
        raise refusal(scheme, "the KV cache is scaled otherwise than in fp8 with one fixed scale per tensor")


def _read_fp8(section: ConfigFields) -> Quantization:
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise refusal(section, f"fmt is {section.text('fmt', '')}")
    activations = section.text("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        raise refusal(section, f"activation_scheme is {activations}")
    ignored = (
        "lm_head",  # never quantized, and not always said
        *layer_patterns(section, "ignored_layers"),
        *layer_patterns(section, "modules_to_not_convert"),
    )
    if not section.present("weight_block_size"):
        inputs: InputScales = "tensor" if activations == "static" else "token"
        scheme = QuantizationScheme(number="fp8", weight_scales="tensor", input_scales=inputs)
        return Quantization(rules=(Rule(_EVERY_LAYER, scheme),), ignored=ignored)
    if activations == "static":
        raise refusal(section, "activation_scheme is static with weight_block_size")
    scheme = QuantizationScheme(
        number="fp8",
        weight_scales="block",
        input_scales="group",
        block=section.pair("weight_block_size"),
        scale_name="weight_scale_inv",
    )
    return Quantization(rules=(Rule(_EVERY_LAYER, scheme),), ignored=ignored)
