"""What the spellings of `quantization_config` share: names of layers, and what is said of those that are not run."""

from __future__ import annotations

from dataclasses import replace

import regex
from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Rounding

SUPPORTED = (
    "fp8 (e4m3) or int8 weights of compressed-tensors (float-quantized, int-quantized, naive-quantized) per tensor, "
    "channel, group (int8) or block (fp8), inputs per tensor (static) or per token; int4 and int8 in pack-quantized; "
    "nvfp4 and mxfp4 there; quant_method fp8, fbgemm_fp8, modelopt (FP8, NVFP4) and quark (FP8); AWQ (gemm); GPTQ and "
    "AutoRound of 2, 3, 4 and 8 bits; bitsandbytes; torchao of FP8, INT8 and INT4; HQQ; mxfp4 for experts"
)
# Where the text model is a part of one for images; its layers have our names without these.
_TEXT_MODEL = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)


def refusal(fields: ConfigFields, what: str) -> ModelLoadError:
    """One line with what is run instead."""
    return ModelLoadError(f"{fields.source}: {what}; pagefleet runs {SUPPORTED}")


def read_rounding(group: ConfigFields, block: tuple[int, int] | None = None) -> Rounding | None:
    """What one of compressed-tensors' config_groups does to inputs.

    Raises:
        ModelLoadError: it is not run.
    """
    if not group.present("input_activations"):
        return None
    inputs = group.section("input_activations")
    kind, bits = inputs.text("type", "int"), inputs.count("num_bits", 8)
    if bits != 8 or kind not in ("float", "int"):
        raise refusal(inputs, f"{kind} of {bits} bits")
    zeros = not inputs.flag("symmetric", True)
    if zeros and kind == "float":
        raise refusal(inputs, "numbers have a zero point (symmetric is false)")
    strategy, dynamic = inputs.text("strategy", "tensor"), inputs.flag("dynamic", False)
    rounded = Rounding(number="fp8" if kind == "float" else "int8", scales="token", zero_points=zeros)
    match strategy, dynamic:
        case "tensor", False:
            return replace(rounded, scales="tensor")
        case (("token" | "tensor"), True):
            # One scale for a whole step would let requests change each other's numbers.
            return rounded
        case "group", True if not zeros and block is not None and inputs.count("group_size") == block[1]:
            return replace(rounded, scales="group", group=block[1])
        case _:
            raise refusal(inputs, f"{'dynamic' if dynamic else 'static'} inputs with strategy {strategy}")


def layer_patterns(fields: ConfigFields, name: str) -> tuple[str, ...]:
    """The field's names of layers, or `re:` and a regular expression, with our names for layers.

    Raises:
        ModelLoadError: an expression is none.
    """
    patterns = fields.texts(name)
    for pattern in patterns:
        if pattern.startswith("re:"):
            check_expression(pattern.removeprefix("re:"), pattern, fields, name)
    return tuple(own_name(pattern) for pattern in patterns)


def check_expression(expression: str, pattern: str, fields: ConfigFields, name: str) -> None:
    """Raises ModelLoadError where the field has what is no regular expression, in a pattern."""
    try:
        regex.compile(expression)
    except regex.error as error:
        raise ModelLoadError(
            f"{fields.source}: {name} has {pattern[:80]!r}, no regular expression ({error}): repair the file"
        ) from error


def own_name(pattern: str) -> str:
    """Of a layer of a text model that is a part of another."""
    for theirs, ours in _TEXT_MODEL:
        if pattern.startswith(theirs):
            return ours + pattern.removeprefix(theirs)
    return pattern
