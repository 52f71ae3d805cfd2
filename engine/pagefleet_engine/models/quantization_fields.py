"""What the spellings of `quantization_config` share: names of layers, and what is said of those that are not run."""

from __future__ import annotations

import re

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.errors import ModelLoadError

SUPPORTED = (
    "fp8 (e4m3) or int8 weights of compressed-tensors (float-quantized, int-quantized, naive-quantized), symmetric, "
    "per tensor, channel or (fp8) block; inputs per tensor (static) or per token; quant_method fp8; mxfp4 for experts; "
    "and with inputs as they are pack-quantized int4 and int8, AWQ (gemm) and GPTQ of 2, 3, 4 and 8 bits"
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
        re.compile(expression)
    except re.error as error:
        raise ModelLoadError(
            f"{fields.source}: {name} has {pattern[:80]!r}, no regular expression ({error}): repair the file"
        ) from error


def own_name(pattern: str) -> str:
    """Of a layer of a text model that is a part of another."""
    for theirs, ours in _TEXT_MODEL:
        if pattern.startswith(theirs):
            return ours + pattern.removeprefix(theirs)
    return pattern
