"""How a checkpoint's matrices are stored, from the `quantization_config` of its config.json."""

from __future__ import annotations

from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError

AUTOROUND = ("auto-round", "auto_round", "intel/auto-round")
"""Spellings of one method."""
_STORED = {"fp8": "fp8", "gguf": "gguf", "mxfp4": "mxfp4", "awq": "int4", "fbgemm_fp8": "fp8", "modelopt_fp4": "fp4"}
_QUARK = {"fp8_e4m3": "fp8"}
_MODELOPT = {"FP8": "fp8", "NVFP4": "fp4", "FP8_PER_CHANNEL_PER_TOKEN": "fp8"}
_OTHER_FORM = (
    "choose the model in a form of compressed-tensors, AWQ, GPTQ or GGUF, or take its float weights, of which "
    "`pagefleet quantize` makes 4 bits, and loading 8"
)
_NOT_RUN = {
    "aqlm": ("AQLM", f"{_OTHER_FORM} (--quantization int8)"),
    "deepspeedfp": ("DeepSpeedFP", f"{_OTHER_FORM} (--quantization fp8)"),
    "eetq": ("EETQ", f"{_OTHER_FORM} (--quantization int8)"),
    "hqq": ("HQQ", f"{_OTHER_FORM} (--quantization int8)"),
    "torchao": ("torchao", f"{_OTHER_FORM} (--quantization int8 or fp8)"),
}


def quant_method(section: ConfigFields) -> str:
    """The section's `quant_method`. Files of bitsandbytes that are older than that field say how they are loaded, which
    counts before it, as it does to transformers.

    Raises:
        ModelConfigError: it is one of those that are known and not run.
    """
    if section.flag("load_in_8bit", False) or section.flag("load_in_4bit", False):
        return "bitsandbytes"
    method = section.text("quant_method", "")
    if method in _NOT_RUN:
        name, remedy = _NOT_RUN[method]
        raise ModelConfigError(f"{section.source}: {name} (quant_method {method}) is not run: {remedy}")
    if method == "quark" and (number := _quark_number(section)) not in _QUARK:
        raise ModelConfigError(
            f"{section.source}: Quark (quant_method quark) of {number} is not run, only fp8_e4m3: export it so, or "
            f"as awq (custom_mode), or {_OTHER_FORM} (--quantization fp8)"
        )
    return method


def _quark_number(section: ConfigFields) -> str:
    """What most weights are in."""
    everywhere = section.section("global_quant_config")
    if everywhere.present("weight") and "weight" not in everywhere.section_names():
        return "numbers in several steps"
    return everywhere.section("weight").text("dtype", "")[:80] or "no dtype"


def quantized_as(fields: ConfigFields) -> str:
    """Return fp8, fp4, mxfp4, nf4, gguf or int8, int4, int3, int2 where matrices are stored so, else an empty text.

    The engine reads how in detail.

    Raises:
        ModelConfigError: they are stored in another form.
    """
    if not fields.present("quantization_config"):
        return ""
    section = fields.section("quantization_config")
    method = quant_method(section)
    stored, said = _STORED.get(method, ""), method[:80] or "not given"
    if method in ("gptq", *AUTOROUND):
        stored = f"int{section.count('bits', low=2, high=8)}"
    elif method == "bitsandbytes":
        stored = "int8" if section.flag("load_in_8bit", False) else section.text("bnb_4bit_quant_type", "fp4")[:8]
    elif method == "quark":
        stored = _QUARK[_quark_number(section)]
    elif method == "modelopt":
        algorithm = section.text("quant_algo", "")[:80]
        stored, said = _MODELOPT.get(algorithm.upper(), ""), f"modelopt of {algorithm or 'no quant_algo'}"
    elif method == "compressed-tensors":
        groups = section.section("config_groups")
        each = [groups.section(name).section("weights") for name in groups.section_names()]
        names = sorted({_number_type(weights) for weights in each})
        if names in (["fp8"], ["fp4"]) or (names and all(name in ("int4", "int8") for name in names)):
            stored = names[0]
        said = f"compressed-tensors of {', '.join(names)[:80] or 'no groups'}"
    if stored:
        return stored
    raise ModelConfigError(
        f"{section.source}: quant_method is {said}; pagefleet runs awq, gptq, auto-round, bitsandbytes, fp8, "
        "fbgemm_fp8, modelopt of FP8 and NVFP4, quark of FP8, mxfp4, and fp8, fp4, int8 or int4 of compressed-tensors: "
        "choose one of these checkpoints, or one without quantization"
    )


def _number_type(weights: ConfigFields) -> str:
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8)
    return f"{'fp' if kind == 'float' else kind}{bits}"
