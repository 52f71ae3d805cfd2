"""Matrices in numbers of a few bits, as AutoRound's sections spell them: GPTQ's or AWQ's words, and rules of its own.

Source: AutoRound's `export_to_autoround`, and the meaning that its own reader gives the fields.
"""

from __future__ import annotations

import re

from pagefleet_protocol.model_config.fields import ConfigFields

from pagefleet_engine.layers.quantization_scheme import PackedScheme, Quantization, Rule
from pagefleet_engine.models.packed_config import EVERY_LAYER, HEAD, anywhere, awq_scheme, gptq_scheme
from pagefleet_engine.models.quantization_fields import check_expression, own_name, refusal

_USUAL_PACKING = "auto_round:auto_gptq"
_LESS_ONE = ("auto_gptq", "gptq")
"""Of packings in GPTQ's words, those whose zero points are stored less one."""
_AS_THEY_ARE = ("auto_round", "exllamav2", "exllama", "tritonv2", "triton", "torch", "gptqmodel")
_PLAIN_BITS = 16
_OF_EXPRESSIONS = re.compile(r"[\\^$*+?()\[\]{}|]")


def read_autoround(section: ConfigFields) -> Quantization:
    """`quant_method` auto-round.

    Raises:
        ModelLoadError: it is not run.
    """
    extra = section.section("extra_config")
    usual = {name: section.count(name, low=-1) for name in ("bits", "group_size") if section.present(name)}
    shared = {
        **usual,
        "sym": section.flag("sym", True),
        "data_type": section.text("data_type", "int"),
        "act_bits": section.count("act_bits", _PLAIN_BITS),
        "packing_format": section.text("packing_format", _USUAL_PACKING),
    }
    ignored = [HEAD, *map(anywhere, map(own_name, section.texts("modules_to_not_convert")))]
    named, matched = list[Rule](), list[Rule]()
    for name in extra.section_names():
        own = extra.section(name).with_defaults(shared)
        is_expression = _OF_EXPRESSIONS.search(name) is not None
        if is_expression:
            check_expression(name, name, section, "extra_config")
        pattern = f"re:.*?(?:{name})" if is_expression else anywhere(own_name(name))
        if own.count("bits") > 8:
            ignored.append(pattern)
        elif own_name(name) == HEAD:
            raise refusal(own, f"AutoRound of the head in {own.count('bits')} bits")
        else:
            (matched if is_expression else named).append(Rule((pattern,), _scheme(own)))
    rules = (*named, *matched, Rule(_blocks(section), _scheme(section.with_defaults(shared))))
    return Quantization(rules=rules, ignored=tuple(ignored))


def _scheme(section: ConfigFields) -> PackedScheme:
    kind, inputs = section.text("data_type", "int"), section.count("act_bits", _PLAIN_BITS)
    if not kind.startswith("int") or inputs < _PLAIN_BITS:
        raise refusal(section, f"AutoRound of {kind} with inputs of {inputs} bits")
    packing = section.text("packing_format", _USUAL_PACKING)
    last = packing.replace("autoround", "auto_round").split(":")
    if "awq" in last or "auto_awq" in last:
        return awq_scheme(section)
    if any(part in _LESS_ONE for part in last):
        return gptq_scheme(section, "gptq")
    if all(part in _AS_THEY_ARE for part in last):
        return gptq_scheme(section, "gptq_v2")
    raise refusal(section, f"packing_format of AutoRound is {packing}")


def _blocks(section: ConfigFields) -> tuple[str, ...]:
    """Patterns of the blocks whose layers are quantized; every layer where none is named."""
    name = "block_name_to_quantize" if section.present("block_name_to_quantize") else "to_quant_block_names"
    given = section.joined_texts(name)
    return tuple(rf"re:{re.escape(own_name(f'{block}.'))}" for block in given) or EVERY_LAYER
