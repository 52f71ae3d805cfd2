"""How a checkpoint's matrices are stored, from the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Callable

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
}
_TORCHAO = {
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
    "Int8WeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Int4WeightOnlyConfig": "int4",
    "Float8DynamicActivationInt4WeightConfig": "int4",
    "IntxWeightOnlyConfig": "",
    "Int8DynamicActivationIntxWeightConfig": "",
}
"""What weights are in by torchao's configurations; empty: in as many bits as these say."""
_TORCHAO_VERSIONS = {"Float8DynamicActivationInt4WeightConfig": 1}
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_HQQ_BITS = (8, 6, 5, 4, 3, 2, 1)
_HQQ_SCALES = ("scale_quant_params", "zero_quant_params")


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
    if method == "torchao":
        torchao_default(section)
    if method == "hqq":
        hqq_parameters(section)
    return method


def torchao_default(section: ConfigFields) -> ConfigFields:
    """torchao's configuration for all layers, or of all by name.

    Raises:
        ModelConfigError: one in it is not run.
    """
    found = section.section("quant_type").section("default") if "quant_type" in section.section_names() else None
    if found is None:
        raise ModelConfigError(
            f"{section.source}: torchao whose quant_type is a name is of before 0.15, which wrote pickled files: load "
            "the model with transformers, quantize it with torchao 0.15 or later, and save it, or "
            f"{_OTHER_FORM} (--quantization int8 or fp8)"
        )
    for config in _torchao_configs(found):
        kind, version = config.text("_type", ""), config.count("_version", 1)
        if kind not in _TORCHAO:
            raise ModelConfigError(
                f"{config.source}: torchao (quant_method torchao) of {kind[:80] or 'no _type'} is not run, only "
                f"{', '.join(_TORCHAO)}: quantize with one of these, or {_OTHER_FORM} (--quantization int8 or fp8)"
            )
        if version < _TORCHAO_VERSIONS.get(kind, 2):
            raise ModelConfigError(
                f"{config.source}: torchao's {kind} of version {version} is not run, only 2: quantize again with "
                f"torchao 0.15 or later, or {_OTHER_FORM} (--quantization int8 or fp8)"
            )
    return found


def torchao_by_name(config: ConfigFields) -> ConfigFields | None:
    """What one of torchao's configurations has for layers by their names; None: it is for all alike."""
    if config.text("_type", "") not in _BY_NAME:
        return None
    data = config.section("_data")
    return data.section("fqn_to_config" if data.section("fqn_to_config").section_names() else "module_fqn_to_config")


def _torchao_configs(config: ConfigFields) -> list[ConfigFields]:
    """One, or what it has by name, that for all others last."""
    each = torchao_by_name(config)
    if each is None:
        return [config]
    return [each.section(name) for name in sorted(each.section_names(), key="_default".__eq__)]


def _torchao_number(section: ConfigFields) -> str:
    """What most weights are in."""
    configs = _torchao_configs(torchao_default(section))
    if not configs:
        return ""
    data = configs[-1].section("_data")
    bits = data.section("weight_dtype").text("_data", "int8") if "weight_dtype" in data.section_names() else "int8"
    return _TORCHAO[configs[-1].text("_type", "")] or ("int4" if bits <= "int4" else "int8")


def hqq_parameters(section: ConfigFields) -> dict[str, ConfigFields]:
    """How HQQ has weights: of all layers by the empty name, or by layers' names within a block.

    Raises:
        ModelConfigError: some are not run.
    """
    config = section.section("quant_config")
    tags = [""] if "weight_quant_params" in config.names() else config.section_names()
    each = {tag: config.section(tag) if tag else config for tag in tags}
    for one in each.values():
        weights = one.section("weight_quant_params")
        said = weights.number("nbits"), weights.count("axis", 1, low=0)
        if said[1] != 1 or said[0] not in _HQQ_BITS or any(map(one.present, _HQQ_SCALES)):
            raise ModelConfigError(
                f"{weights.source}: HQQ (quant_method hqq) of {said[0]:g} bits along axis {said[1]} is not run, only "
                f"of {', '.join(map(str, _HQQ_BITS))} bits along axis 1 with scales in floats: quantize so, or "
                f"{_OTHER_FORM} (--quantization int8)"
            )
    if not each:
        raise ModelConfigError(f"{config.source} is empty: download the checkpoint again")
    return {tag: one.section("weight_quant_params") for tag, one in each.items()}


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
    elif method in _NUMBERS:
        stored = _NUMBERS[method](section)
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
        "fbgemm_fp8, modelopt of FP8 and NVFP4, quark of FP8, torchao, hqq, mxfp4, and fp8, fp4, int8 or int4 of "
        "compressed-tensors: choose one of these checkpoints, or one without quantization"
    )


def _number_type(weights: ConfigFields) -> str:
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8)
    return f"{'fp' if kind == 'float' else kind}{bits}"


def _hqq_number(section: ConfigFields) -> str:
    return "int8" if next(iter(hqq_parameters(section).values())).number("nbits") > 4 else "int4"


_NUMBERS: dict[str, Callable[[ConfigFields], str]] = {
    "quark": lambda section: _QUARK[_quark_number(section)],
    "torchao": _torchao_number,
    "hqq": _hqq_number,
}
